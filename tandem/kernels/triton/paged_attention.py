"""Paged attention in two launches: the keys' splits for each tile, KV head and group of queries, and their merge."""

from collections.abc import Mapping

import torch
import triton

from tandem.kernels.step_tables import StepTables
from tandem.kernels.triton.attention_kernels import attend, merge
from tandem.kernels.tuning import tuned

_FEWEST_QUERIES = 16
"""What the smallest matrix product takes."""
_MAX_SPLITS = 128
_MERGED_COLUMNS = 128
_LOG2_E = 1.4426950408889634


def launch_paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    tables: StepTables,
    scale: float,
    value_dim: int,
    parameters: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """See tandem.kernels.paged_attention.

    parameters, the tuned ones by default: `queries` and `keys` of a matrix product, num_warps, num_stages, and either
    `splits` or `programs_per_sm`, how many run on a multiprocessor at a time.
    """
    rows, heads, key_dim = q.shape
    block_tokens, parts, kv_heads = kv.shape[1:4]
    latent = parts == 1
    group = heads // kv_heads
    values = max(16, triton.next_power_of_2(value_dim))
    rotated = key_dim - value_dim if latent else 0
    per_tile = min(tables.rows_per_tile, rows) * group
    if parameters is None:
        size = min(128, max(_FEWEST_QUERIES, triton.next_power_of_2(per_tile)))
        kind = "single" if q.element_size() == 4 else f"{'latent' if latent else 'pair'}-{values}-{size}"
        parameters = tuned("paged_attention", kind, q.device)
    queries = parameters["queries"]
    groups = triton.cdiv(per_tile, queries)
    splits = parameters.get("splits") or _splits(tables, rows, kv_heads * groups, block_tokens, parameters, q.device)

    out = torch.empty((rows, heads, value_dim), dtype=q.dtype, device=q.device)
    results, sums = out, out
    if splits > 1:
        results = torch.empty((rows, heads, splits, value_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    attend[(kv_heads * groups, splits, len(tables.tiles))](
        q,
        kv,
        results,
        sums,
        tables.tiles,
        tables.first_rows,
        tables.prefixes,
        tables.tree_starts,
        tables.ancestors,
        tables.block_tables,
        scale * _LOG2_E,
        rows,
        len(tables.tree_starts),
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        tables.ancestors.stride(0),
        tables.block_tables.stride(0),
        tables.rows_per_tile,
        groups,
        splits,
        tables.ancestors.shape[1],
        GROUP=group,
        HEADS=heads,
        BLOCK_TOKENS=block_tokens,
        WHOLE=splits == 1,
        LATENT=latent,
        VALUE_DIM=value_dim,
        VALUES=values,
        ROTATED_DIM=rotated,
        ROTATED=max(16, triton.next_power_of_2(max(1, rotated))),
        QUERIES=queries,
        FEW_QUERIES=max(_FEWEST_QUERIES, queries // 4),
        KEYS=parameters["keys"],
        num_warps=parameters["num_warps"],
        num_stages=parameters["num_stages"],
    )
    if splits > 1:
        columns = min(values, _MERGED_COLUMNS)
        merge[(heads, rows, triton.cdiv(value_dim, columns))](
            results,
            sums,
            out,
            tables.first_rows,
            len(tables.tree_starts),
            splits,
            HEADS=heads,
            SPLITS=triton.next_power_of_2(splits),
            VALUE_DIM=value_dim,
            COLUMNS=columns,
            num_warps=4,
        )
    return out.view(rows, heads * value_dim)


def _splits(
    tables: StepTables,
    rows: int,
    programs_per_tile: int,
    block_tokens: int,
    parameters: Mapping[str, int],
    device: torch.device,
) -> int:
    """So many that all programs run at once, by what the tables have room for: the same for all steps of a bucket."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = max(len(tables.tree_starts), triton.cdiv(rows, tables.rows_per_tile))
    longest = tables.block_tables.shape[1] * block_tokens
    wanted = processors * parameters["programs_per_sm"] // (tiles * programs_per_tile)
    return max(1, min(wanted, triton.cdiv(longest, parameters["keys"]), _MAX_SPLITS))
