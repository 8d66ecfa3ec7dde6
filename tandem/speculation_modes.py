"""Names of the protos' speculation modes. A number that this release does not know is its own name."""

from tandem.v1 import generation_pb2

MODE_NUMBERS = {
    "default": generation_pb2.SPECULATION_MODE_UNSPECIFIED,
    "off": generation_pb2.SPECULATION_MODE_OFF,
    "block": generation_pb2.SPECULATION_MODE_BLOCK,
    "tree": generation_pb2.SPECULATION_MODE_TREE,
    "auto": generation_pb2.SPECULATION_MODE_AUTO,
}
_NAMES = {number: name for name, number in MODE_NUMBERS.items()}


def mode_name(number: int) -> str:
    return _NAMES.get(generation_pb2.SpeculationMode.ValueType(number), str(number))


def mode_number(name: str) -> "generation_pb2.SpeculationMode.ValueType":
    """Of a name that mode_name gave."""
    return MODE_NUMBERS[name] if name in MODE_NUMBERS else generation_pb2.SpeculationMode.ValueType(int(name))
