"""Random numbers keyed by position: the draw for position p of a request is Philox(seed, p).

Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) as numpy provides it: key = seed,
counter = p, first of the four words of the block. So a token's draw does not depend on batch, draft shape, process or
how the sequence came to that position.
"""

import numpy as np


def position_uniforms(seed: int, position: int, count: int) -> np.ndarray:
    """Uniforms in [0, 1) for `count` positions from `position` on, float64, 53 bits each."""
    # numpy increments the counter before each block of four words.
    counter = (position - 1) % (1 << 256)
    words = np.random.Philox(key=seed, counter=counter).random_raw(4 * count)[::4]
    return (words >> np.uint64(11)) * (1.0 / (1 << 53))
