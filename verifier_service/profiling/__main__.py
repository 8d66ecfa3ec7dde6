"""Starts the verifier's engine on a config's target, drives it and writes the profile as JSON."""

import argparse
import gc
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.bench.machine import machine, machine_line, versions
from tandem.bench.step_profile import PARTS, profile_of
from tandem.config import StackConfig, load_config
from tandem.errors import StartupError
from tandem.service_main import set_up_process, start_up_errors
from tandem.speculation import DraftSource, SpeculationMode

if TYPE_CHECKING:
    from verifier_service.profiling.driver import Scenario


def main() -> None:
    parser = argparse.ArgumentParser(prog="verifier_service.profiling", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="where the profile goes")
    parser.add_argument("--clients", type=_numbers, default=[1, 4])
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--block-nodes", type=int, default=7)
    parser.add_argument("--tree-nodes", type=int, default=31)
    parser.add_argument("--accepted", type=int, default=3, help="right tokens of each draft")
    parser.add_argument("--steps", type=int, default=20, help="per request and run at least")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with start_up_errors("profile"):
        config = load_config(options.config)
        set_up_process("profile", config.verifier)
        options.json.write_text(json.dumps(profile(config, options), indent=2) + "\n")


def profile(config: StackConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Here, not above: OpenMP's environment must be set before torch is loaded."""
    from prometheus_client import CollectorRegistry

    from tandem.torch_setup import pick_device
    from verifier_service.app import build
    from verifier_service.profiling.device_trace import DeviceTrace
    from verifier_service.profiling.driver import Driver
    from verifier_service.profiling.recorder import Recorder

    if config.verifier.parallel.ep > 1:
        raise StartupError(f"verifier.parallel.ep: a profile is of one rank, is {config.verifier.parallel.ep}")
    # Nothing here decides by what steps cost.
    quick = config.model_copy(update={"verifier": config.verifier.model_copy(update={"warm_up_seconds": 0.0})})
    device = pick_device(config.verifier.device, "verifier.device")
    recorder = Recorder(DeviceTrace() if device.type == "cuda" else None)
    with recorder.watching():
        engine, info, _ = build(quick, CollectorRegistry())
        gc.freeze()  # as the service does
        needed = options.context + 2 + options.steps * (1 + options.accepted) + 3 * options.tree_nodes
        if needed > info.max_context:
            raise StartupError(f"verifier.max_context: a profile takes {needed} tokens, is {info.max_context}")
        wanted = scenarios(options, config.speculates)
        source = DraftSource(config.drafter.draft_source)
        steps = options.runs, options.steps, options.accepted
        Driver(engine, info.vocab_size, wanted, *steps, source, recorder.begin).run()
    kinds = [s for s in wanted if recorder.steps.get(s)]
    profiles = [profile_of(s.mode.value, s.clients, s.rows, s.context, recorder.steps[s], tuple(PARTS)) for s in kinds]
    return {
        "profiles": [asdict(p) | {"overhead": p.overhead} for p in profiles],
        "accepted": options.accepted,
        "model": info.model,
        "dtype": info.dtype,
        "machine": machine(),
        "machine_line": machine_line(),
        "versions": versions(),
    }


def scenarios(options: argparse.Namespace, speculates: bool) -> "list[Scenario]":
    """Plain steps, blocks and trees; only plain ones where nothing is drafted."""
    from verifier_service.profiling.driver import Scenario

    kinds = [(SpeculationMode.OFF, 0)]
    if speculates:
        kinds += [(SpeculationMode.BLOCK, options.block_nodes), (SpeculationMode.TREE, options.tree_nodes)]
    return [Scenario(mode, nodes, n, options.context) for n in options.clients for mode, nodes in kinds]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
