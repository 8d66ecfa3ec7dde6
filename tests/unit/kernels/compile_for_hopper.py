"""Compiles the kernels for a Hopper GPU, on a machine without one, by launching them with a driver that only compiles.

Run by test_kernels_compile.py in a process of its own, with TRITON_INTERPRET=0. Tensors are small and on the CPU.
"""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tandem.kernels.route import Routing
from tandem.kernels.triton.fused_moe import launch_fused_moe
from tandem.kernels.triton.kv_compaction import launch_kv_compaction
from tandem.kernels.triton.paged_attention import launch_paged_attention
from tandem.kernels.triton.rms_norm import launch_add_rms_norm, launch_rms_norm
from tandem.kernels.triton.rope import launch_keep_keys_and_values, launch_keep_latents, launch_rope
from tandem.kernels.triton.route import launch_route
from tandem.kernels.triton.sampling import launch_sample
from tandem.kernels.triton.top_k import launch_top_k
from tandem.kernels.triton.walk import launch_walk
from tests.unit.kernels.attention_case import Rows, make_case
from tests.unit.kernels.experts import routing, stack

_TILES = {"queries": 32, "keys": 16, "num_warps": 4, "num_stages": 2}


class _Hopper:
    """As much of a Triton driver as compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _compile_only() -> None:
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **parameters: Any) -> Any:
        print("compiling", self.__name__, flush=True)
        return run(self, *args, grid=grid, warmup=True, **parameters)

    driver.set_active(_Hopper())
    JITFunction.run = compiled


def main() -> None:
    """Every kernel in the ways that take other branches."""
    _compile_only()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16()

    for splits, shape in ((2, {"key_dim": 24, "kv_heads": 1}), (1, {"key_dim": 48, "value_dim": 32})):
        case = make_case([Rows(40, 8)], heads=4, rows_per_tile=8, dtype=torch.bfloat16, **shape)
        parameters = {**_TILES, "splits": splits}
        launch_paged_attention(case.q, case.kv, case.tables, case.scale, case.value_dim, parameters)
    moves = torch.zeros(5, dtype=torch.int32)
    launch_kv_compaction(random(2, 32, 2, 2, 16), moves, moves)
    launch_rms_norm(random(4, 64), random(64), 1e-6)
    launch_add_rms_norm(random(4, 64), random(4, 64), random(64), 1e-6)
    slots = torch.arange(4)
    for in_pairs in (False, True):
        rotation = random(4, 1, 16), random(4, 1, 16)
        launch_rope(random(4, 2, 16), rotation, in_pairs)
        launch_keep_latents(random(4, 48), random(32), 1e-6, rotation, in_pairs, random(2, 16, 1, 1, 48), slots)
    for norms in (None, (random(16), random(16))):
        kv = random(2, 16, 2, 2, 16)
        launch_keep_keys_and_values(random(4, 8, 16), 4, norms, 1e-6, rotation, kv, slots)
    for form in ("plain", "int4", "fp8"):
        launch_fused_moe(random(2, 128), stack(form, 2, 128, 128, torch.bfloat16), *routing(2, 2, 2, "any"))
    for groups in (1, 4):
        routing_of = Routing(sigmoid=groups > 1, groups=groups, kept_groups=groups // 2, normalise=True, scale=2.5)
        launch_route(torch.randn(2, 16), torch.randn(16) if groups > 1 else None, 4, routing_of)
    launch_top_k(random(2, 64), 4)
    launch_sample(random(2, 64), torch.ones(2), torch.zeros(2, dtype=torch.float64))
    rows = torch.zeros(4, dtype=torch.int32)
    launch_walk(rows.long(), rows.long(), rows, rows, 3)


if __name__ == "__main__":
    main()
