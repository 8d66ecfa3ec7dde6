"""Errors that cross module borders. The servicers turn them into gRPC statuses, the services into start-up errors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field of a request: its proto path and what is allowed."""

    field: str
    reason: str


class InvalidRequest(ValueError):
    """A request has wrong fields; becomes INVALID_ARGUMENT with a google.rpc.BadRequest."""

    def __init__(self, *violations: FieldViolation):
        super().__init__("; ".join(f"{v.field}: {v.reason}" for v in violations))
        self.violations = violations


def invalid(field: str, reason: str) -> InvalidRequest:
    """An InvalidRequest with one violation."""
    return InvalidRequest(FieldViolation(field, reason))


class Overloaded(RuntimeError):
    """No room now; becomes RESOURCE_EXHAUSTED with a google.rpc.RetryInfo."""

    def __init__(self, message: str, retry_after_seconds: float):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(RuntimeError):
    """A part cannot be reached or is ending; becomes UNAVAILABLE with a google.rpc.RetryInfo."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class StartupError(RuntimeError):
    """The service cannot start: one line that names the file and the key, tensor or address."""
