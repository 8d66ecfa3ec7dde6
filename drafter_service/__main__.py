"""`python -m drafter_service --config x.yaml`"""

from tandem.config import StackConfig
from tandem.service_main import service_main


async def _run(config: StackConfig) -> None:
    # Here, not above: OpenMP's environment must be set before torch is loaded.
    from drafter_service.app import run_drafter

    await run_drafter(config)


if __name__ == "__main__":
    service_main("drafter", lambda config: config.drafter, _run)
