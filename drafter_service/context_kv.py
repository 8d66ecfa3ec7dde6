"""Keys and values of one sequence in the draft model."""

import torch

_FIRST_CAPACITY = 256


class ContextKV:
    """All layers' keys and values by position: the committed context and, right behind it, the block being drafted.

    Only the context lasts. The block's slots are written over by the next context or the next block, so a rejected
    draft leaves nothing to undo.
    """

    def __init__(self, before: tuple[int, ...], behind: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        """before, behind: dimensions of the storage on either side of the positions."""
        self._before, self._behind = before, behind
        self._store = torch.empty((*before, 0, *behind), dtype=dtype, device=device)

    def reserve(self, positions: int) -> torch.Tensor:
        """The storage [*before, capacity, *behind], capacity at least `positions`.

        Growing doubles it, so appending costs amortised constant time per position. What was written stays.
        """
        axis = len(self._before)
        held = capacity = self._store.shape[axis]
        if positions > capacity:
            capacity = max(_FIRST_CAPACITY, capacity)
            while capacity < positions:
                capacity *= 2
            grown = self._store.new_empty((*self._before, capacity, *self._behind))
            grown.narrow(axis, 0, held).copy_(self._store)
            self._store = grown
        return self._store
