"""The losslessness matrix: every shipped prompt, temperature 0 and 0.8, three seeds each, undrafted and in each mode of
speculation, one at a time and in batches of 8. Emitted ids must be equal. `make lossless` runs it in fp32 and in bf16.

Exits 1 if any ids differ in fp32. In bf16 each first divergence is printed with the gap between the two tokens'
log-probabilities: what is no near-tie is a fault.
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tandem.bench.machine import machine_line
from tandem.cli.local_stack import local_stack
from tandem.client import AsyncClient, Message
from tandem.prompts import load_prompts, mixed_prompts

SEEDS = (1, 2, 3)
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Case:
    """One generation of the matrix."""

    prompt: str
    temperature: float
    seed: int


@dataclass(frozen=True)
class Output:
    """What a generation gave."""

    token_ids: list[int]
    log_probs: list[float]
    drafts: int


def config_with(config: Path, dtype: str, folder: Path) -> Path:
    """A copy of a stack's config with another dtype."""
    data = yaml.safe_load(config.read_text())
    for key in ("target", "draft_model"):
        data[key] = str((config.parent / data[key]).resolve())
    data["verifier"]["dtype"] = data["drafter"]["dtype"] = dtype
    path = folder / f"{dtype}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


async def run_matrix(
    client: AsyncClient, cases: list[Case], messages: dict[str, list[Message]], mode: str, batch: int, max_tokens: int
) -> dict[Case, Output]:
    """All cases, `batch` at a time."""
    outputs: dict[Case, Output] = {}
    queue = list(reversed(cases))

    async def worker() -> None:
        while queue:
            case = queue.pop()
            generation = client.generate(
                messages[case.prompt],
                temperature=case.temperature,
                seed=case.seed,
                max_tokens=max_tokens,
                ignore_eos=True,
                speculation_mode=mode,  # type: ignore[arg-type]
                log_probs=True,
            )
            log_probs = [p async for chunk in generation for p in chunk.log_probs]
            assert generation.final
            outputs[case] = Output(list(generation.token_ids), log_probs, generation.final.drafts)

    await asyncio.gather(*(worker() for _ in range(batch)))
    return outputs


def divergences(plain: dict[Case, Output], drafted: dict[Case, Output]) -> list[tuple[Case, int, float]]:
    """(case, index of the first differing token, gap of the two tokens' log-probabilities) of cases that differ."""
    found = []
    for case, a in plain.items():
        b = drafted[case]
        if a.token_ids != b.token_ids:
            at = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y)
            found.append((case, at, abs(a.log_probs[at] - b.log_probs[at])))
    return found


async def measure(config: Path, dtype: str, modes: list[str], count: int, max_tokens: int) -> dict[str, object]:
    """Run the matrix on a stack of its own; returns the summary."""
    prompts = mixed_prompts(min(count, len(load_prompts())))
    messages = {p.id: [Message(t.role, t.content) for t in p.messages] for p in prompts}
    cases = [Case(p.id, t, s) for p in prompts for t in TEMPERATURES for s in SEEDS]
    summary: dict[str, object] = {"dtype": dtype, "cases": len(cases), "max_tokens": max_tokens, "batches": {}}
    with tempfile.TemporaryDirectory() as folder:
        async with local_stack(config_with(config, dtype, Path(folder))) as address, AsyncClient(address) as client:
            reference: dict[Case, Output] = {}
            for batch in (1, 8):
                for mode in ("off", *modes):
                    started = time.monotonic()
                    outputs = await run_matrix(client, cases, messages, mode, batch, max_tokens)
                    reference = reference or outputs
                    differing = divergences(reference, outputs)
                    drafts = sum(o.drafts for o in outputs.values())
                    asked = {"off": drafts == 0, "auto": True}
                    assert asked.get(mode, drafts > 0), "speculation did not do what was asked"
                    seconds = time.monotonic() - started
                    print(
                        f"{dtype} batch {batch} {mode:5}: {len(cases) - len(differing)} of {len(cases)} equal to "
                        f"off at batch 1, {drafts} drafts, {seconds:.0f} s",
                        flush=True,
                    )
                    for case, at, gap in differing:
                        print(f"  {case.prompt} T={case.temperature} seed {case.seed}: token {at}, gap {gap:.5f}")
                    summary["batches"][f"{mode}, batch {batch}"] = {  # type: ignore[index]
                        "equal": len(cases) - len(differing),
                        "drafts": drafts,
                        "divergences": [
                            {"prompt": c.prompt, "temperature": c.temperature, "seed": c.seed, "token": at, "gap": gap}
                            for c, at, gap in differing
                        ],
                    }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--modes", default="block,tree,auto", help="compared with off")
    parser.add_argument("--prompts", type=int, default=1000, help="first N prompts only")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [
        asyncio.run(measure(options.config, dtype, options.modes.split(","), options.prompts, options.max_tokens))
        for dtype in options.dtypes.split(",")
    ]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine_line(), "results": results}, indent=1) + "\n")
    for result in results:
        batches = result["batches"]
        assert isinstance(batches, dict)
        if result["dtype"] == "float32" and any(b["divergences"] for b in batches.values()):
            raise SystemExit("fp32: drafted and undrafted ids differ")


if __name__ == "__main__":
    main()
