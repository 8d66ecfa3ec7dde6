"""Keys and values of one sequence in the draft model."""

import torch

_FIRST_CAPACITY = 256


class ContextKV:
    """All layers' keys and values by position: the committed context and, right behind it, the block being drafted.

    Only the context lasts. The block's slots are written over by the next context or the next block, so a rejected
    draft leaves nothing to undo.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self._store = torch.empty((layers, 2, kv_heads, 0, head_dim), dtype=dtype, device=device)

    def reserve(self, positions: int) -> torch.Tensor:
        """The storage [layers, 2 (keys, values), kv_heads, capacity, head_dim], capacity at least `positions`.

        Growing doubles it, so appending costs amortised constant time per position. What was written stays.
        """
        layers, two, kv_heads, capacity, head_dim = self._store.shape
        if positions > capacity:
            capacity = max(_FIRST_CAPACITY, capacity)
            while capacity < positions:
                capacity *= 2
            grown = self._store.new_empty((layers, two, kv_heads, capacity, head_dim))
            grown[:, :, :, : self._store.shape[3]] = self._store
            self._store = grown
        return self._store
