"""Find which of many literals occur in a name, at a cost that hardly grows with their number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


class Inside:
    """Literals anywhere in a name. ``find`` gives the numbers of those that occur, in ascending order."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._always = [number for number, literal in enumerate(literals) if not literal]
        numbers = {literal: number for number, literal in enumerate(literals) if literal}
        # The pattern finds the longest literal at a place; all others that match there begin it.
        self._numbers = {
            word: [numbers[word[:end]] for end in range(1, len(word) + 1) if word[:end] in numbers] for word in numbers
        }
        self._search = re.compile(_trie_pattern(numbers)).search if numbers else None

    def find(self, name: str) -> list[int]:
        if self._search is None or (match := self._search(name)) is None:
            return self._always
        found = set(self._always)
        while match is not None:
            found.update(self._numbers[match[0]])
            match = self._search(name, match.start() + 1)
        return sorted(found)


class AtStart:
    """Literals at the beginning of a name."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._numbers = {literal: number for number, literal in enumerate(literals)}
        self._lengths = sorted({len(literal) for literal in literals})

    def find(self, name: str) -> list[int]:
        numbers = self._numbers
        return sorted([numbers[part] for length in self._lengths if (part := name[:length]) in numbers])


class AtEnd(AtStart):
    """Literals at the end of a name."""

    def find(self, name: str) -> list[int]:
        numbers = self._numbers
        return sorted([numbers[part] for length in self._lengths if (part := name[-length:]) in numbers])


def _trie_pattern(words: Iterable[str]) -> str:
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _branch(trie)


def _branch(node: dict[str, Any]) -> str:
    ways = [_way(letter, child) for letter, child in node.items() if letter]
    if not ways:
        return ""
    text = ways[0] if len(ways) == 1 and "" not in node else f"(?:{'|'.join(ways)})"
    return text + "?" if "" in node else text


def _way(letter: str, child: dict[str, Any]) -> str:
    """The pattern from ``letter`` on; a chain without branches is written out, so that groups nest only at branches."""
    chain = re.escape(letter)
    while len(child) == 1 and "" not in child:
        [(letter, child)] = child.items()
        chain += re.escape(letter)
    return chain + _branch(child)
