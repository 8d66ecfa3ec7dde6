"""transformers' generate, or the PyPI `dflash` package's reference loop, driven line by line as llama_child is.

The one argument is JSON: model (the target's folder), eos, and for dflash draft (the draft model's folder).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    target: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
    target.eval()
    package = "dflash" if settings.get("draft") else "transformers"
    decode = _dflash(target, settings) if settings.get("draft") else _generate(target)
    passed: list[float] = []
    target.register_forward_hook(lambda *_: passed.append(time.perf_counter()))
    about = f"{package} {version(package)}, {torch.get_num_threads()} threads"
    print(json.dumps({"about": about}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        passed.clear()
        started = time.perf_counter()
        with torch.inference_mode():
            token_ids = decode(request["prompt"], request["max_tokens"])
        seconds = time.perf_counter() - started
        # The first pass is the prompt's, and gives the first token.
        reply = {"token_ids": token_ids, "seconds": seconds, "first_seconds": passed[0] - started}
        print(json.dumps(reply), file=replies)


def _generate(target: Any) -> Callable[[list[int], int], list[int]]:
    def decode(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        greedy = {"do_sample": False, "temperature": None, "top_p": None}
        out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **greedy)
        return out[0, len(prompt) :].tolist()

    return decode


def _dflash(target: Any, settings: dict[str, Any]) -> Callable[[list[int], int], list[int]]:
    from dflash.model import DFlashDraftModel, dflash_generate

    draft = DFlashDraftModel.from_pretrained(settings["draft"], dtype=torch.bfloat16).eval()

    def decode(prompt: list[int], count: int) -> list[int]:
        out = dflash_generate(draft, target, torch.tensor([prompt]), count, settings["eos"])
        return out[0, len(prompt) :].tolist()

    return decode


if __name__ == "__main__":
    main()
