"""The lists of names that a plan and a report share, and how they read to a person."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_SHOWN = 12

#: What to do about tensors on the meta device that no checkpoint stores.
STRANDED = (
    "buffers or tensor attributes on the meta device that loading does not fill; build the module inside "
    "streamload.skeleton(), which keeps them real, or let streamload.restore_buffers put them right; what depends on a "
    "parameter has to be computed after loading"
)


class Mismatch(NamedTuple):
    """A tensor whose shape or dtype does not fit its target."""

    name: str
    expected: str
    found: str
    file: str


class Incomplete(NamedTuple):
    """A fused parameter of which parts are missing."""

    name: str
    present: list[str]
    missing: list[str]
    wanted: list[str]
    """Names in the checkpoint that would fill the missing parts."""

    def __str__(self) -> str:
        there = f"part {', '.join(self.present)} present, " if self.present else ""
        return (
            f"{self.name}: {there}part {', '.join(self.missing)} missing; would be filled by {', '.join(self.wanted)}"
        )


class Cast(NamedTuple):
    """A float conversion."""

    name: str
    source: str
    target: str
    narrows: bool
    """Whether range or precision can be lost."""


@dataclass(repr=False)
class Keys:
    """What becomes of every name."""

    missing_keys: list[str] = field(default_factory=list)
    """Parameters and persistent buffers that the checkpoint does not fill."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that have no place in the module."""
    mismatched_keys: list[Mismatch] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    """Name -> the rule that dropped it."""
    tied: dict[str, str] = field(default_factory=dict)
    """Further name of a tied parameter -> the name whose memory it shares."""
    casts: list[Cast] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prefix: str = ""
    """What was put before the checkpoint's names."""
    incomplete: list[Incomplete] = field(default_factory=list)
    """Fused parameters, also in ``missing_keys``, of which some parts have arrived or stacked rules would fill."""
    stranded: list[str] = field(default_factory=list)
    """Non-persistent buffers and plain tensor attributes on the meta device, which no checkpoint fills."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Unexpected name -> the rule that made it so, and what it became."""
    partly: dict[str, str] = field(default_factory=dict)
    """Missing name -> what the hook that should fill it did and said."""
    known: list[str] = field(default_factory=list)
    """All names of the module."""

    def __repr__(self) -> str:
        """Counts: the lists can have 100,000 names."""
        lists = ("missing_keys", "unexpected_keys", "mismatched_keys", "stranded", "dropped", "tied", "casts", "notes")
        found = [f"{len(getattr(self, name))} {name}" for name in lists if getattr(self, name)]
        return f"{type(self).__name__}({', '.join([*self._amounts(), *found])})"

    def _amounts(self) -> list[str]:
        return []

    @property
    def ok(self) -> bool:
        """Whether every name found its place, and nothing stays on the meta device."""
        return not (self.missing_keys or self.unexpected_keys or self.mismatched_keys or self.stranded)

    def keys_to_dict(self) -> dict[str, Any]:
        """The lists, as JSON can hold them."""
        return {
            "missing_keys": list(self.missing_keys),
            "unexpected_keys": list(self.unexpected_keys),
            "mismatched_keys": [mismatch._asdict() for mismatch in self.mismatched_keys],
            "dropped": dict(self.dropped),
            "tied": dict(self.tied),
            "incomplete": [each._asdict() for each in self.incomplete],
            "stranded": list(self.stranded),
            "casts": [cast._asdict() for cast in self.casts],
            "notes": list(self.notes),
            "prefix": self.prefix,
        }

    def problems(self) -> list[str]:
        """One line for each kind of problem with its names."""
        lines = []
        if self.missing_keys:
            lines.append(f"{len(self.missing_keys)} missing: {summarise(self.missing_keys, self.known)}")
        if self.unexpected_keys:
            lines.append(f"{len(self.unexpected_keys)} unexpected: {summarise(self.unexpected_keys)}")
        lines += [f"{name}: {became}" for name, became in list(self.renamed.items())[:_SHOWN]]
        lines += [str(each) for each in self.incomplete if each.name in self.missing_keys][:_SHOWN]
        lines += [f"{name}: {what}" for name, what in self.partly.items() if name in self.missing_keys][:_SHOWN]
        for mismatch in self.mismatched_keys[:_SHOWN]:
            lines.append(
                f"mismatched: {mismatch.name}: expected {mismatch.expected}, found {mismatch.found} in {mismatch.file}"
            )
        if len(self.mismatched_keys) > _SHOWN:
            lines.append(f"and {len(self.mismatched_keys) - _SHOWN} more mismatched")
        if self.stranded:
            lines.append(f"{len(self.stranded)} on meta: {summarise(self.stranded)}: {STRANDED}")
        lines += [note for note in self.notes if note.startswith(("ignore_", "mapper="))]
        if hint := prefix_hint(self.missing_keys, self.unexpected_keys):
            lines.append(hint)
        return lines


def short(items: list[str]) -> list[str]:
    """``items`` where they are few, else the first and how many there are."""
    return items if len(items) <= 6 else [*items[:5], f"... ({len(items)})"]


def summarise(names: Collection[str], known: Collection[str] = ()) -> str:
    """``names`` in short: ``model.layers.2.* (9)`` where all names below are listed, ``layers.{0..23}.x (24)`` for runs."""
    folded = _fold(_whole_branches(names, known))
    shown = [text if count == 1 else f"{text} ({count})" for text, count in folded[:_SHOWN]]
    more = f" and {len(folded) - _SHOWN} more" if len(folded) > _SHOWN else ""
    return ", ".join(shown) + more


def _whole_branches(names: Collection[str], known: Collection[str]) -> Counter[str]:
    """Names, with ``branch.*`` for those branches of the module of which every name is listed."""
    below = Counter(prefix for name in known for prefix in _prefixes(name))
    listed = Counter(prefix for name in names for prefix in _prefixes(name))
    short: Counter[str] = Counter()
    for name in names:
        branch = next((p for p in _prefixes(name) if listed[p] > 1 and listed[p] == below[p]), None)
        short[f"{branch}.*" if branch else name] += 1
    return short


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _fold(names: Counter[str]) -> list[tuple[str, int]]:
    """Fold names that differ in one number into one with a range."""
    groups: dict[str, list[tuple[list[str], int]]] = defaultdict(list)
    for name, count in names.items():
        numbers = re.findall(r"(?<![^.])\d+(?![^.])", name)
        groups[re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)].append((numbers, count))
    folded = []
    for template, members in groups.items():
        columns = zip(*(numbers for numbers, _ in members), strict=True)
        ranges = [_range(sorted(set(column), key=int)) for column in columns]
        for text in ranges:
            template = template.replace("{}", text, 1)
        folded.append((template, sum(count for _, count in members)))
    return folded


def _range(numbers: list[str]) -> str:
    if len(numbers) == 1:
        return numbers[0]
    if int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1:
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(numbers[:6]) + (",..." if len(numbers) > 6 else "") + "}"


def prefix_hint(missing: Iterable[str], unexpected: Iterable[str]) -> str | None:
    """A guess at the prefix by which two lists of names differ, or ``None``."""
    wanted = dict.fromkeys(missing)
    strips: Counter[str] = Counter()
    adds: Counter[str] = Counter()
    endings = {_ending(name, skip): name[: len(name) - len(_ending(name, skip))] for name in wanted for skip in (1, 2)}
    for name in unexpected:
        for skip in (1, 2):
            rest = _ending(name, skip)
            if rest and rest in wanted:
                strips[name[: len(name) - len(rest)]] += 1
        if endings.get(name):
            adds[endings[name]] += 1
    best, verb = max(((strips, "strip"), (adds, "add")), key=lambda pair: max(pair[0].values(), default=0))
    if not best:
        return None
    prefix, count = best.most_common(1)[0]
    side = (
        "the checkpoint's names carry it and the module's do not" if verb == "strip" else "the module's names carry it"
    )
    return f"{verb} {prefix!r}? {count} names would then fit: {side}"


def _ending(name: str, skip: int) -> str:
    return ".".join(name.split(".")[skip:])
