"""Sampling parameters: plain values and their checks, shared by gateway and verifier."""

import math
from dataclasses import dataclass

from tandem.errors import FieldViolation

MAX_TEMPERATURE = 100.0
SEED_LIMIT = 1 << 64


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence's tokens are chosen. Filters apply in the order temperature, top_k, top_p, min_p."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    seed: int = 0
    """64 bits; the random number for position p is a function of (seed, p) alone."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def violations(self, prefix: str = "sampling.") -> list[FieldViolation]:
        """What is wrong with the values, one entry per field; empty if nothing."""
        found = []

        def check(ok: bool, field: str, value: object, allowed: str) -> None:
            if not ok:
                found.append(FieldViolation(prefix + field, f"must be {allowed}, is {value}"))

        finite = math.isfinite(self.temperature)
        check(
            finite and 0 <= self.temperature <= MAX_TEMPERATURE,
            "temperature",
            self.temperature,
            "in [0, 100]",
        )
        check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        check(0 <= self.top_k, "top_k", self.top_k, "at least 0 (0 keeps all tokens)")
        check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        check(0 <= self.seed < SEED_LIMIT, "seed", self.seed, "in [0, 2^64)")
        return found
