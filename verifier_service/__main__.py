"""`python -m verifier_service --config x.yaml`"""

import asyncio

from tandem.config import load_config, with_ranks
from tandem.logs import setup_logging
from tandem.service_main import service_parser, set_up_process, start_up_errors


def main() -> None:
    """Run the verifier, or one rank of it, until it ends."""
    parser = service_parser("verifier")
    parser.add_argument("--ep", type=int, help="ranks in all, in place of verifier.parallel.ep")
    parser.add_argument("--tp", type=int, help="1 or as many as --ep, in place of verifier.parallel.tp")
    arguments = parser.parse_args()
    with start_up_errors("verifier"):
        config = with_ranks(load_config(*arguments.config), arguments.ep, arguments.tp)
        section = config.verifier
        set_up_process("verifier", section)

        # Here, not above: OpenMP's environment must be set before torch is loaded.
        from verifier_service.parallel.launch import launch

        member = launch(section.parallel.ep)
        if member.rank:
            setup_logging(f"verifier/{member.rank}", section.log_level)
            from verifier_service.parallel.follower import follow

            follow(config, member)
        else:
            from verifier_service.app import run_verifier

            asyncio.run(run_verifier(config, member))


if __name__ == "__main__":
    main()
