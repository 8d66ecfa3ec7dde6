"""Tandem beside its peers on the same weights and prompts, in one run: plain and drafted decoding through the three
processes, transformers' generate, and the PyPI `dflash` package's reference loop. Greedy, bf16, one request at a time.

    python -m benchmarks.peers --config configs/demo.yaml --json benchmarks/results/peers.json

The contenders take turns within every repeat; tokens/s are over whole requests, prompt included. The peers run in this
process with torch's own thread settings, while the stack idles.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

from tandem.bench.machine import machine_line
from tandem.cli.local_stack import local_stack
from tandem.client import AsyncClient, Message
from tandem.config import load_config
from tandem.prompts import mixed_prompts

Decode = Callable[[list[int], int], list[int]]
"""(prompt ids, tokens to emit) -> emitted ids."""


def peers(target_folder: Path, draft_folder: Path, eos: list[int]) -> dict[str, Decode]:
    """The contenders that run in this process."""
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16).eval()
    draft = DFlashDraftModel.from_pretrained(draft_folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def transformers(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            temperature=None,
            top_p=None,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def dflash(prompt: list[int], count: int) -> list[int]:
        out = dflash_generate(draft, target, torch.tensor([prompt]), count, eos)
        return out[0, len(prompt) :].tolist()

    return {"transformers": transformers, "dflash package": dflash}


async def through_stack(client: AsyncClient, prompt: list[int], count: int, mode: str) -> list[int]:
    generation = client.generate(prompt, temperature=0, max_tokens=count, speculation_mode=mode)  # type: ignore[arg-type]
    async for _ in generation:
        pass
    return generation.token_ids


async def measure(config_path: Path, prompts: int, max_tokens: int, repeats: int) -> dict[str, object]:
    config = load_config(config_path)
    assert config.draft_model
    speeds: dict[str, list[float]] = {}
    outputs: dict[str, list[list[int]]] = {}
    async with local_stack(config_path) as address, AsyncClient(address) as client:
        eos = (await client.model()).eos_token_ids
        others = peers(config.target, config.draft_model, eos)
        chats = [[Message(t.role, t.content) for t in p.messages] for p in mixed_prompts(prompts)]
        ids = [await client.tokenize(chat) for chat in chats]
        for repeat in range(repeats + 1):  # The first is a warm-up.
            for name in ("tandem off", "tandem block", *others):
                started, emitted = time.perf_counter(), []
                for prompt in ids:
                    if name in others:
                        emitted.append(others[name](prompt, max_tokens))
                    else:
                        emitted.append(await through_stack(client, prompt, max_tokens, name.split()[1]))
                speed = sum(map(len, emitted)) / (time.perf_counter() - started)
                outputs[name] = emitted
                if repeat:
                    speeds.setdefault(name, []).append(speed)
                    print(f"repeat {repeat} {name:14} {speed:6.1f} tokens/s", flush=True)
    reference = outputs["tandem off"]
    return {
        "machine": machine_line(),
        "prompts": prompts,
        "max_tokens": max_tokens,
        "results": [
            {
                "contender": name,
                "tokens_per_second": statistics.median(values),
                "tandem_block_over_it": statistics.median(
                    ours / theirs for ours, theirs in zip(speeds["tandem block"], values, strict=True)
                ),
                "tandem_off_over_it": statistics.median(
                    ours / theirs for ours, theirs in zip(speeds["tandem off"], values, strict=True)
                ),
                "answers_equal_to_tandem_off": sum(a == b for a, b in zip(outputs[name], reference, strict=True)),
            }
            for name, values in speeds.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measure(options.config, options.prompts, options.max_tokens, options.repeats))
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
