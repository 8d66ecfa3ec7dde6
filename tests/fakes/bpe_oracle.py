"""Byte-level BPE written from its definition, as an oracle for tokenizers that are built from parts."""

from itertools import pairwise

import regex

GPT2_SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DIGIT = regex.compile(r"(\p{N})")


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


class BpeOracle:
    """encode() of text without special tokens; pieces that spell one stay text."""

    def __init__(self, tokens: list[str], merges: list[str], split_digits: bool) -> None:
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.split_digits = split_digits
        self.alphabet = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        pieces = [piece for piece in DIGIT.split(text) if piece] if self.split_digits else [text]
        words = [word for piece in pieces for word in GPT2_SPLIT.findall(piece)]
        return [index for word in words for index in self._word(word)]

    def _word(self, word: str) -> list[int]:
        symbols = [self.alphabet[byte] for byte in word.encode() if self.alphabet[byte] in self.ids]
        while len(symbols) > 1:
            ranked = [(self.ranks.get(pair, 1 << 60), at) for at, pair in enumerate(pairwise(symbols))]
            rank, at = min(ranked)
            if rank == 1 << 60:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]
