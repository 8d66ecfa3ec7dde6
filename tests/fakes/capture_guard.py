"""Whether a step could be captured and replayed as a graph, found out on the CPU.

What a capture bakes in is imitated: the operations of one run are recorded with the very tensors and Python values they
were called with, and replayed on those. A step passes if no run waits for the host or leaves new storage behind, and
if, for other contents of its static buffers, a replay leaves the same bits as a step built anew that runs as it is.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {
    "__array__", "__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "argwhere", "bincount",
    "cpu", "cuda", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "pin_memory", "tolist", "unique",
    "unique_consecutive",
}  # fmt: skip
_WAITING_KERNELS = {
    "_local_scalar_dense", "_unique", "_unique2", "allclose", "bincount", "equal", "is_nonzero", "item",
    "masked_select", "nonzero", "nonzero_numpy", "unique_consecutive", "unique_dim",
}  # fmt: skip
_FROM_HOST = {"as_tensor", "asarray", "frombuffer", "scalar_tensor", "tensor"}
_FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "zeros"}
_INDEXING = {"_index_put_impl_", "_unsafe_index", "index", "index_put", "index_put_"}


class CaptureFault(AssertionError):
    """The step cannot be captured, or a replay of it would be wrong."""


@dataclass(frozen=True)
class Candidate:
    """A step, and all it reads and writes: weights aside, nothing else may decide what it does."""

    step: Callable[[], None]
    buffers: Sequence[torch.Tensor]
    """Inputs, state and outputs."""


def check_capturable(build: Callable[[], Candidate], changes: Sequence[Callable[[], None]]) -> None:
    """CaptureFault unless the step passes.

    build: makes the step anew, with buffers of its own. The first one built is captured. changes: each brings other
    contents into that one's buffers, in place.
    """
    candidate = build()
    candidate.step()
    with _Watch(), _NoWaiting():
        candidate.step()
    _check_storage(candidate.step)
    record = _Record()
    with record:
        candidate.step()
    for number, change in enumerate(changes):
        change()
        before = [buffer.clone() for buffer in candidate.buffers]
        record.replay()
        fresh = build()
        for buffer, contents in zip(fresh.buffers, before, strict=True):
            buffer.copy_(contents)
        fresh.step()
        for place, (got, expected) in enumerate(zip(candidate.buffers, fresh.buffers, strict=True)):
            if not torch.equal(got, expected):
                raise CaptureFault(f"change {number}: a replay leaves other contents in buffer {place} than a new step")


class _NoWaiting(TorchFunctionMode):
    """What Python calls: some of it never comes to a kernel on the CPU, but would wait on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _WAITS:
            raise CaptureFault(f"{name}: waits for the device")
        if name in _FROM_HOST:
            raise CaptureFault(f"{name}: copies from the host")
        if name in _FACTORIES and "device" not in kwargs and "out" not in kwargs:
            raise CaptureFault(f"{name}: makes a tensor on the host: no device is given")
        if name == "to" and any(isinstance(x, (str, torch.device)) for x in [*args[1:], kwargs.get("device")]):
            raise CaptureFault("to: copies between devices")
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """What kernels run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[-1], kwargs or {}
        if name in _WAITING_KERNELS:
            raise CaptureFault(f"{name}: waits for the device")
        if name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[-1], torch.Tensor):
            raise CaptureFault(f"{name}: waits for the device: its size is data")
        if name in _INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            raise CaptureFault(f"{name}: waits for the device: indexed by a mask")
        return func(*args, **kwargs)


class _NewStorage(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                self.made.append((str(func), StorageWeakRef(tensor.untyped_storage())))
        return result


def _check_storage(step: Callable[[], None]) -> None:
    new = _NewStorage()
    with new:
        step()
    gc.collect()
    left = [name for name, storage in new.made if not storage.expired()]
    if left:
        raise CaptureFault(f"storage made inside the step is still held after it: by {', '.join(left)}")


class _Record(TorchDispatchMode):
    """Operations with the tensors and values of one run."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Lists are kept as they are now: a caller may go on filling them.
        kept = torch.utils._pytree.tree_map(lambda x: x, (args, kwargs or {}))
        self._operations.append((func, *kept, list(_tensors(result))))
        return result

    def replay(self) -> None:
        for func, args, kwargs, results in self._operations:
            for now, then in zip(_tensors(func(*args, **kwargs)), results, strict=True):
                if now.shape != then.shape:
                    raise CaptureFault(f"{func}: the shape of its result is data: {then.shape}, then {now.shape}")
                if now.data_ptr() != then.data_ptr():
                    then.copy_(now)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    """Weights packed for the CPU have no storage to look at."""
    return (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.layout is torch.strided)
