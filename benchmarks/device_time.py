"""How long work takes on the device itself, without the host's time to launch it."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds_per_pass(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Of one call of work(), which must do all it does on the device: the median of `repeats`. On a GPU it is captured
    first, so that many small kernels follow each other as they do in a captured step."""
    if device.type != "cuda":
        work()
        return statistics.median(_by_clock(work) for _ in range(repeats))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    graph.replay()
    return statistics.median(_by_events(graph.replay) for _ in range(repeats))


def copy_ceiling(device: torch.device, size: int) -> float:
    """Bytes per second read and written, together, by a copy of `size` bytes within the device's memory."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_per_pass(lambda: target.copy_(source), device)


def _by_clock(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _by_events(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
