"""What it costs the ranks of one host to add up a tensor: through shared memory, or by gloo.

    python -m benchmarks.reduction --ranks 2,8 --rows 1,8,64,256 --width 576

Ranks do nothing else, and meet again at once. Figures are rank 0's, milliseconds per all-reduce.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from verifier_service.parallel.distributed import DistributedRanks
from verifier_service.parallel.launch import fork_ranks
from verifier_service.parallel.ranks import Group
from verifier_service.parallel.shared_memory import SharedMemoryRanks

WARM_UPS, ROUNDS = 20, 200


def measure(transport: str, size: int, rows: list[int], width: int, dtype: torch.dtype) -> dict[int, float]:
    """By rows the median of ROUNDS all-reduces, over `size` new processes of which this one is rank 0."""
    member = fork_ranks(size)
    ranks: Group
    if transport == "shared":
        assert member.memory
        ranks = SharedMemoryRanks(member.memory, member.rank, size)
    else:
        ranks = DistributedRanks(member, torch.device("cpu"))
    medians = {}
    for count in rows:
        x = torch.zeros(count, width, dtype=dtype)
        seconds = []
        for _ in range(WARM_UPS + ROUNDS):
            started = time.perf_counter()
            ranks.all_reduce(x)
            seconds.append(time.perf_counter() - started)
        medians[count] = statistics.median(seconds[WARM_UPS:])
    if member.rank:
        os._exit(0)
    for pid in member.pids.values():
        os.waitpid(pid, 0)
    if transport == "gloo":
        dist.destroy_process_group()
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--transport", choices=("shared", "gloo"), default="shared")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [int(count) for count in arguments.rows.split(",")]
    for size in map(int, arguments.ranks.split(",")):
        medians = measure(arguments.transport, size, rows, arguments.width, getattr(torch, arguments.dtype))
        figures = ", ".join(f"[{count}, {arguments.width}] {1e3 * median:.3f}" for count, median in medians.items())
        print(f"{arguments.transport}, {size} ranks, {arguments.dtype}, ms: {figures}", flush=True)


if __name__ == "__main__":
    main()
