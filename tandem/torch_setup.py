"""Process-wide torch settings of drafter and verifier."""

import torch

from tandem.errors import StartupError


def pick_device(name: str, key: str) -> torch.device:
    """ "auto" is cuda where there is one. StartupError naming the config key if it is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"{key}: cuda was asked for, torch finds none")
    return torch.device(name)


def set_threads(threads: int | None) -> None:
    """CPU threads for one operation; None keeps torch's choice, all cores."""
    if threads:
        torch.set_num_threads(threads)


def leave_cores_to_native() -> None:
    """Beside a model on the CPU's native path: what is left to torch is small, and its idle threads would spin on the
    cores that the native code's need."""
    torch.set_num_threads(1)
