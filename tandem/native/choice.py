"""Whether a model runs on the native path: what its config asks for, and what keeps it from there."""

import logging
from typing import Literal

from tandem.errors import StartupError

logger = logging.getLogger(__name__)


def takes_native(kernels: Literal["auto", "native"], reason: str | None, model: str, key: str) -> bool:
    """reason: what keeps it; None: nothing. Otherwise auto takes torch, and the log says why; native is a StartupError.

    model: as the log names it. key: the config's that `kernels` comes from.
    """
    if reason is None:
        logger.info("the %s runs on the CPU's native path", model)
        return True
    if kernels == "native":
        raise StartupError(f"{key}: native is not possible here: {reason}")
    logger.info("the %s runs in torch, not on the CPU's native path: %s", model, reason)
    return False
