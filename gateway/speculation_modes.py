"""Names of the protos' speculation modes. A number that this release does not know is its own name."""

from tandem.v1 import generation_pb2

_NUMBERS = {
    "default": generation_pb2.SPECULATION_MODE_UNSPECIFIED,
    "off": generation_pb2.SPECULATION_MODE_OFF,
    "block": generation_pb2.SPECULATION_MODE_BLOCK,
}
_NAMES = {number: name for name, number in _NUMBERS.items()}


def mode_name(number: int) -> str:
    return _NAMES.get(generation_pb2.SpeculationMode.ValueType(number), str(number))


def mode_number(name: str) -> "generation_pb2.SpeculationMode.ValueType":
    return _NUMBERS[name]
