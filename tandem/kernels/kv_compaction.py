"""Moving what a step's accepted rows wrote to where the sequence goes on: in the KV pool and in the feature pool."""

import torch


def kv_compaction(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """In every layer pool[:, targets] = pool[:, sources], all slots read before one is written.

    pool [layers, slots, ...], contiguous from the third dimension on: the KV pool with blocks and their tokens
    flattened, or a feature pool [1, slots, hidden]. sources, targets [moves] int32 or int64: slots; a move from a slot
    to itself does nothing, so unused moves are any such pair whose slot no other move writes. No slot is written
    twice. Nothing waits for the device.
    """
    if pool.is_cuda:
        from tandem.kernels.triton.kv_compaction import launch_kv_compaction

        launch_kv_compaction(pool, sources, targets)
    else:
        pool.index_copy_(1, targets.long(), pool.index_select(1, sources.long()))
