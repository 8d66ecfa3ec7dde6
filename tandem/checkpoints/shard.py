"""Which part of a tensor a rank holds."""

from dataclasses import dataclass

from tandem.errors import StartupError


@dataclass(frozen=True)
class Shard:
    """One of `count` equal parts of a dimension."""

    index: int = 0
    count: int = 1

    def of(self, size: int, what: str) -> range:
        """This part of range(size). StartupError, naming what is to be split and the numbers, if it does not divide."""
        if size % self.count:
            raise StartupError(f"{what}: {size} cannot be split over {self.count} ranks")
        each = size // self.count
        return range(self.index * each, (self.index + 1) * each)


WHOLE = Shard()
