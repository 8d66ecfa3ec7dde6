"""Collectives by torch.distributed: NCCL between GPUs, gloo between CPUs of several hosts."""

from datetime import timedelta

import torch
import torch.distributed as dist

from tandem.errors import Unavailable
from verifier_service.parallel.launch import Member
from verifier_service.parallel.rendezvous import environment_store

_FOREVER = timedelta(days=365)
"""Ranks wait as long as nobody asks for anything. The links say when one is gone."""


class DistributedRanks:
    """All ranks gather all parts and add them up themselves, in rank order and in fp32: the same bits everywhere, and
    for a row whatever else is in the step. A ring's order depends on where in the tensor an element lies.

    Of n ranks each receives n - 1 parts, where a ring would have it receive 2 (n - 1) / n.
    """

    def __init__(self, member: Member, device: torch.device):
        self.rank = member.rank
        self.size = member.size
        self._abortion: Exception | None = None
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=member.store or environment_store(),
            rank=member.rank,
            world_size=member.size,
            timeout=_FOREVER,
            device_id=device if device.type == "cuda" else None,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        flat = x.contiguous().view(-1)
        gathered = flat.new_empty(self.size * flat.numel())
        try:
            dist.all_gather_into_tensor(gathered, flat)
        except RuntimeError as error:
            raise self._abortion or Unavailable(f"verifier: ranks do not reach each other: {error}") from error
        parts = gathered.view(self.size, -1)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype).view(x.shape)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        try:
            dist.gather(x.contiguous(), parts)
        except RuntimeError as error:
            raise self._abortion or Unavailable(f"verifier: ranks do not reach each other: {error}") from error
        return torch.cat(parts, dim=-1) if parts else x

    def abort(self, error: Exception) -> None:
        """Called by another thread of rank 0: what breaks from now on, breaks for this reason."""
        self._abortion = error
