"""Finding stop strings in text that arrives in pieces.

The automaton of Aho and Corasick ("Efficient string matching", CACM 18(6), 1975): its state after a character is the
longest end of the text that begins a stop string. So each character costs O(1) amortised, whatever the pieces, and the
state's depth says how much text must still be kept back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Node:
    depth: int
    children: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None
    """The longest proper end of this node's string that is a node too; None at the root."""
    found: str | None = None
    """The longest stop string that this node's string ends with."""


@dataclass(frozen=True)
class StopMatch:
    """A stop string was completed."""

    stop_string: str
    end: int
    """Characters of the piece up to and including the stop string's last."""


class StopStringMatcher:
    """Reads one text. The stop string whose last character comes first wins; of several that end there, the longest."""

    def __init__(self, stop_strings: Sequence[str]):
        """`stop_strings` are not empty; without any, nothing matches and nothing is kept back."""
        self._root = _build(stop_strings)
        self._state = self._root

    @property
    def held(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return self._state.depth

    def feed(self, text: str) -> StopMatch | None:
        """Read a piece, up to the first stop string in it. Nothing is to be fed after a match."""
        if not self._root.children:
            return None
        for index, character in enumerate(text):
            node: _Node | None = self._state
            while node is not None and character not in node.children:
                node = node.fallback
            self._state = self._root if node is None else node.children[character]
            if self._state.found is not None:
                return StopMatch(self._state.found, index + 1)
        return None


def _build(stop_strings: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop_string in stop_strings:
        node = root
        for character in stop_string:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.found = stop_string
    # Breadth first, so that a node's fallback, which is shallower, is complete before it is used.
    queue = deque([root])
    while queue:
        parent = queue.popleft()
        for character, node in parent.children.items():
            queue.append(node)
            fallback = parent.fallback
            while fallback is not None and character not in fallback.children:
                fallback = fallback.fallback
            node.fallback = root if fallback is None else fallback.children[character]
            node.found = node.found or node.fallback.found
    return root
