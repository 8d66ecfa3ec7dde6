"""How byte-level BPE spells bytes: each as one visible character, itself where it is one, else one from U+0100 on."""


def _byte_alphabet() -> dict[str, int]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


def token_bytes(spelling: str | None) -> bytes:
    """The bytes a byte-level token stands for; a spelling outside the alphabet stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in spelling or "")
    except KeyError:
        return (spelling or "").encode()


def spelling_of(token: bytes) -> str:
    """The vocabulary's spelling of a token."""
    return "".join(map(_CHARACTER_OF.__getitem__, token))
