"""Launch parameters of Triton kernels: data, one file per GPU name, `tuned/default.json` for the others.

A file maps a kernel's name to its shape classes and each of these to the numbers the kernel is launched with, such as
{"paged_attention": {"pair-128-16": {"block_n": 64, "num_warps": 4, "num_stages": 3}}}. The class "any" stands for those
not named. The default must fit every GPU: it takes at most 99 KiB of shared memory, which is what sm_120 has.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "tuned"
_DEFAULT = "default"
_ANY = "any"


def tuned(kernel: str, shape_class: str, device: torch.device) -> Mapping[str, int]:
    """A kernel's parameters for a class of shapes on this device: the class before "any", the GPU's file before the
    default. KeyError if no file has either."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _DEFAULT
    return _tuned(kernel, shape_class, name.replace(" ", "_").replace("/", "_"))


@cache
def _tuned(kernel: str, shape_class: str, gpu: str) -> Mapping[str, int]:
    for name in (gpu, _DEFAULT):
        classes = _file(name).get(kernel, {})
        for key in (shape_class, _ANY):
            if key in classes:
                return classes[key]
    raise KeyError(f"{FOLDER / _DEFAULT}.json: {kernel} has neither {shape_class!r} nor {_ANY!r}")


@cache
def _file(name: str) -> dict[str, dict[str, dict[str, int]]]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
