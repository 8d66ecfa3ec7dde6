"""Keeps a file of what the experts got, for `tandem experts plan`."""

import asyncio
import logging
from pathlib import Path

from tandem.expert_files import ExpertLoads, write_loads
from verifier_service.expert_load import ExpertLoad

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 60.0


class LoadsFile:
    """Written every minute and when asked, if there is anything new. A verifier that starts leaves its predecessor's
    file alone until it has served."""

    def __init__(self, path: Path, model: str, experts: ExpertLoad):
        self._path = path
        self._model = model
        self._experts = experts
        self._written = experts.totals()

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """A file that cannot be written is logged: it is no reason to stop serving."""
        totals = self._experts.totals()
        if totals == self._written:
            return
        try:
            write_loads(self._path, ExpertLoads(model=self._model, layers=totals))
        except OSError as error:
            logger.warning("verifier.parallel.expert_loads: cannot write %s: %s", self._path, error.strerror)
            return
        self._written = totals
