"""The rules of a mapper and what one of them does to one name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from streamload.errors import MappingError

Part: TypeAlias = "str | int"
"""One part of a fused parameter."""

ShardId: TypeAlias = "str | int | tuple[str | int, ...] | list[str | int] | Expert"
"""Which part of a fused parameter: one part, a tuple of neighbours that the tensor spans, or a list of parts that each
get the whole tensor."""

_USUAL: tuple[Part, ...] = ("q", "k", "v")

AtHome = Callable[[str], bool]
"""Whether a module has something of that name."""


class Expert(NamedTuple):
    """Part ``shard`` (or all, when ``None``) of one entry of a parameter that stacks experts."""

    number: int
    shard: str | int | None = None


class Mapped(NamedTuple):
    """Where a stored tensor goes: a parameter of the module, and which part of it (``None`` for the whole)."""

    name: str
    shard: ShardId | None = None


class Place(NamedTuple):
    """Where a stored tensor, or a part of it, goes."""

    name: str
    shard: ShardId | None = None
    among: tuple[str, ...] = ()
    """The parameters that the stored tensor is spread over, when it is."""
    transposed: bool = False
    """Whether its last two dimensions are swapped on the way."""


class Step(NamedTuple):
    """What one rule did to a name."""

    stage: str
    rule: str
    before: str
    after: str | None
    """``None`` when the rule drops the tensor; equal to ``before`` when it was held back."""
    why: str = ""
    inside: bool = False
    """Whether it hit inside a component of the name."""


class Literal(NamedTuple):
    """A rule that replaces a piece of text, or drops the tensor."""

    number: int
    old: str
    new: str | None
    repeats: tuple[int, ...]
    """Where ``old`` occurs in ``new``: a hit there is the rule's own output."""

    @classmethod
    def make(cls, number: int, old: str, new: str | None) -> Literal:
        return cls(number, old, new, _occurrences(old, new) if new else ())

    def is_own_output(self, name: str, start: int) -> bool:
        """Whether the text at ``start`` of ``name`` is what this rule would have put there."""
        new = self.new
        return new is not None and any(at <= start and name.startswith(new, start - at) for at in self.repeats)

    def __str__(self) -> str:
        return f"{self.old!r} -> {self.new!r}"


class Pattern(NamedTuple):
    """A regular expression; all its matches are replaced, or the tensor is dropped."""

    number: int
    old: re.Pattern[str]
    new: str | None
    shape: re.Pattern[str] | None
    """What it makes, with anything where a group goes."""

    @classmethod
    def make(cls, number: int, old: str | re.Pattern[str], new: str | None) -> Pattern:
        try:
            # Compiled ones are kept as they are: those of the regex package know more, and never run away.
            pattern = re.compile(old) if isinstance(old, str) else old
            if new is None:
                return cls(number, pattern, None, None)
            pattern.sub(new, "")  # which reads the replacement; another library's may do that at the first match only
            if wrong := [number for number in re.findall(r"\\(\d+)", new) if int(number) > pattern.groups]:
                raise IndexError(f"it has {pattern.groups} groups, no number {wrong[0]}")
        except Exception as error:  # each regex library raises its own
            raise MappingError(f"regex rule {text_of(old)!r} -> {new!r}: {error}") from error
        literals = re.split(r"\\(?:\d+|g<\w+>)", new)
        return cls(number, pattern, new, re.compile(".*".join(map(re.escape, literals))))

    def replace(self, name: str, held: bool) -> tuple[str, bool]:
        """``name`` with the matches replaced, and whether some were held back as the rule's own output."""
        kept = False

        def put(match: re.Match[str]) -> str:
            nonlocal kept
            text = match.expand(self.new)  # type: ignore[arg-type]
            if held and len(text) > len(match[0]) and (_surrounded(match, text) or self._made(match, text)):
                kept = True
                return match[0]
            return text

        return self.old.sub(put, name), kept

    def _made(self, match: re.Match[str], text: str) -> bool:
        """Whether the rule would make what it has found here from something shorter."""
        found, name = match[0], match.string
        if self.shape is None or self.shape.fullmatch(found) is None:
            return False
        longer = len(text) - len(found)
        for at in range(len(found) - longer + 1):
            source = name[: match.start() + at] + name[match.start() + at + longer :]
            again = self.old.search(source, match.start())
            if again is not None and again.start() == match.start() and again.expand(self.new) == found:  # type: ignore[arg-type]
                return True
        return False

    def __str__(self) -> str:
        return f"{self.old.pattern!r} -> {self.new!r}"


class Stacked(NamedTuple):
    """A rule that puts a tensor into a part of a fused parameter, matched on whole components of the name.

    The component ``*`` stands for the number of an expert.
    """

    number: int
    old: str
    new: str
    shard: ShardId | None
    parts: tuple[str, ...]

    @classmethod
    def make(cls, number: int, old: str, new: str, shard: ShardId | None) -> Stacked:
        return cls(number, old, new, shard, tuple(old.strip(".").split(".")))

    @property
    def target(self) -> tuple[str, ...]:
        """The components of the fused name."""
        return tuple(self.new.strip(".").split("."))

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """The parts that it fills."""
        if isinstance(self.shard, (tuple, list)) and not isinstance(self.shard, Expert):
            return tuple(self.shard)
        return () if self.shard is None or isinstance(self.shard, Expert) else (self.shard,)

    @property
    def many_experts(self) -> bool:
        return "*" in self.parts

    def put(self, parts: list[str], at: int) -> Mapped:
        """The name that ``parts`` become when the rule fires on those from ``at`` on."""
        count = len(self.parts)
        last = parts[at + count - 1][len(self.parts[-1]) :] if self.parts[-1] != "*" else ""
        name = ".".join([*parts[:at], *self.target, *parts[at + count :]])
        if last:  # "weight" has matched in "weight_scale"
            name = ".".join([*parts[:at], *self.target[:-1], self.target[-1] + last, *parts[at + count :]])
        if not self.many_experts:
            return Mapped(name, self.shard)
        expert = int(parts[at + self.parts.index("*")])
        return Mapped(name, Expert(expert, self.shard))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.old!r} -> {self.new!r} part {self.shard!r}"


class Split(NamedTuple):
    """A rule that spreads one stored tensor over several parameters, in this order along its first dimension."""

    number: int
    old: str
    new: tuple[str, ...]
    parts: tuple[str, ...]

    def put(self, name: str) -> tuple[str, ...]:
        """The names that ``name`` is spread over, none when the rule does not match it."""
        parts, count = name.split("."), len(self.parts)
        for at in range(len(parts) - count + 1):
            if tuple(parts[at : at + count]) == self.parts:
                return tuple(".".join([*parts[:at], new.strip("."), *parts[at + count :]]) for new in self.new)
        return ()

    def __str__(self) -> str:
        return f"{self.old!r} -> {self.new!r}"


def order_of_parts(parts: Iterable[Part]) -> tuple[list[Part], str]:
    """The order in which parts lie: q, k, v; numbers from 0 on; others as they are listed. And why it is not known, when
    some of them can only be slips of the pen, which would shift the rows of the others.
    """
    found = list(dict.fromkeys(parts))
    usual, numbers = [part for part in _USUAL if part in found], sorted(part for part in found if isinstance(part, int))
    if len(usual) == len(found):
        return usual, ""
    if numbers and len(numbers) < len(found):
        return found, "either all of them are numbers or none is"
    if numbers:
        gap = numbers != [*range(len(numbers))]
        return [*numbers], f"numbers have to run from 0 to {len(numbers) - 1}" if gap else ""
    if any(str(part).lower() in _USUAL for part in found):
        return found, "where one is 'q', 'k' or 'v', all have to be"
    return found, ""


def check_shard(old: str, new: object, shard: object) -> None:
    """Raise MappingError when a stacked rule is not one."""
    simple = (str, int)
    parts = shard if isinstance(shard, (tuple, list)) and shard else (shard,)
    fine = all(
        isinstance(each, simple) and not isinstance(each, bool) and (isinstance(each, str) or each >= 0)
        for each in parts
    )
    if not isinstance(new, str) or not new.strip(".") or not (fine or (shard is None and "*" in old.split("."))):
        raise MappingError(
            f"stacked rule {old!r}: expected (name of the fused parameter, part), found {(new, shard)!r:.100}; a part is a "
            'str, an int from 0 on, a tuple of neighbouring parts, or a list of parts (None only where "*" numbers experts)'
        )
    if set(old.strip(".").split(".")) == {"*"}:
        raise MappingError(f'stacked rule {old!r}: "*" alone would hit every number; name the components around it')
    if "*" in old.split(".") and not (shard is None or isinstance(shard, simple)):
        raise MappingError(f"stacked rule {old!r}: an expert's part is a str, an int or None, found {shard!r:.100}")


def text_of(old: Any) -> Any:
    """The text of a rule's key, which can be a compiled pattern of any regex library."""
    return old if isinstance(old, str) else getattr(old, "pattern", old)


def is_inside(name: str, start: int, end: int) -> bool:
    """Whether the text from ``start`` to ``end`` begins or ends within a component of ``name``."""
    if start == end:
        return False
    begins = start == 0 or name[start - 1] == "." or name[start : start + 1] == "."
    ends = end >= len(name) or name[end] == "." or name[end - 1 : end] == "."
    return not (begins and ends)


def _occurrences(old: str, new: str) -> tuple[int, ...]:
    return tuple(at for at in range(len(new) - len(old) + 1) if new.startswith(old, at))


def _surrounded(match: re.Match[str], text: str) -> bool:
    """Whether ``text`` stands around ``match`` already."""
    name, start = match.string, match.start()
    return any(at <= start and name.startswith(text, start - at) for at in _occurrences(match[0], text))
