"""`python -m verifier_service --config x.yaml`"""

from tandem.config import StackConfig
from tandem.service_main import service_main


async def _run(config: StackConfig) -> None:
    # Here, not above: OpenMP's environment must be set before torch is loaded.
    from verifier_service.app import run_verifier

    await run_verifier(config)


if __name__ == "__main__":
    service_main("verifier", lambda config: config.verifier, _run)
