"""Run the rules of a mapper over one name, in vLLM's stage order, so that no rule feeds on itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from streamload.mapping.literals import AtEnd, AtStart, Inside
from streamload.mapping.rules import AtHome, Literal, Mapped, Pattern, Stacked, Step, is_inside

Find = Callable[[str, str], int]

_PLACES: dict[str, tuple[type[Any], Find]] = {
    "substr": (Inside, str.find),
    "prefix": (AtStart, lambda name, old: 0),
    "suffix": (AtEnd, lambda name, old: len(name) - len(old)),
}


class Reading(NamedTuple):
    """One way to read a name."""

    mapped: Mapped | None
    steps: list[Step]
    held: Collection[tuple[str, int]]
    """Rules that did not fire because they would have fired on their own output."""


class Engine:
    """The rules, compiled."""

    def __init__(
        self,
        renaming: Sequence[Any],
        regex: Sequence[Pattern],
        substr: Sequence[Literal],
        stacked: Sequence[Stacked],
        prefix: Sequence[Literal],
        suffix: Sequence[Literal],
    ) -> None:
        self._renaming, self._regex = renaming, regex
        self._before = [_Literals("substr", substr)] if substr else []
        after: dict[str, Sequence[Literal]] = {"prefix": prefix, "suffix": suffix}
        self._after = [_Literals(stage, rules) for stage, rules in after.items() if rules]
        self._stacked = _StackedRules(stacked) if stacked else None

    def read(self, name: str, at_home: AtHome | None) -> Reading:
        """The reading of ``name`` in which no rule feeds on itself; where the module is known and only another reading
        is at home in it, that one.
        """
        reading = self._read(name, at_home, ())
        if at_home is None or not reading.held or reading.mapped is None or at_home(reading.mapped.name):
            return reading
        for free in [*({one} for one in sorted(reading.held)), reading.held]:
            other = self._read(name, at_home, free)
            if other.mapped is not None and at_home(other.mapped.name):
                return other
        return reading

    def _read(self, name: str, at_home: AtHome | None, free: Collection[tuple[str, int]]) -> Reading:
        run = _Run(free)
        before = self._rename(name, run)
        if before is None:
            return Reading(None, run.steps, run.held)
        hits = self._stacked.hits(before, run, loose=at_home is not None) if self._stacked is not None else ()
        for rule, at in hits:
            mapped = rule.put(before.split("."), at)
            other = _Run(free)
            final = self._finish(mapped.name, other)
            if at_home is None or final is None or at_home(final):
                step = Step("stacked", str(rule), before, mapped.name)
                result = None if final is None else Mapped(final, mapped.shard)
                return Reading(result, [*run.steps, step, *other.steps], run.held | other.held)
            why = f"the module has no {final!r}"
            run.steps.append(Step("stacked", str(rule), before, before, why))
        final = self._finish(before, run)
        return Reading(None if final is None else Mapped(final), run.steps, run.held)

    def _rename(self, name: str, run: _Run) -> str | None:
        for rule in self._renaming:
            after = rule.rename_source_key(name)[0]
            if after != name:
                run.steps.append(Step("renaming", str(rule), name, after))
            name = after
        for pattern in self._regex:
            if pattern.old.search(name):
                if pattern.new is None:
                    run.steps.append(Step("regex", str(pattern), name, None))
                    return None
                name = run.replace(pattern, name)
        return _through(self._before, name, run)

    def _finish(self, name: str, run: _Run) -> str | None:
        return _through(self._after, name, run)


class _Run:
    """What happens to one name on its way through the stages."""

    def __init__(self, free: Collection[tuple[str, int]]) -> None:
        self.free = free
        self.steps: list[Step] = []
        self.held: set[tuple[str, int]] = set()

    def hold(self, stage: str, rule: Literal | Pattern | Stacked, name: str) -> None:
        self.held.add((stage, rule.number))
        self.steps.append(Step(stage, str(rule), name, name, "held back: it would fire on its own output"))

    def replace(self, pattern: Pattern, name: str) -> str:
        after, kept = pattern.replace(name, held=("regex", pattern.number) not in self.free)
        if kept:
            self.hold("regex", pattern, name)
        if after != name:
            self.steps.append(Step("regex", str(pattern), name, after))
        return after


def _through(stages: Sequence[_Literals], name: str, run: _Run) -> str | None:
    current: str | None = name
    for stage in stages:
        if current is None:
            break
        current = stage.apply(current, run)
    return current


class _Literals:
    """One stage of literal rules. Each sees the name as the rules before it left it."""

    def __init__(self, stage: str, rules: Sequence[Literal]) -> None:
        kind, self._start = _PLACES[stage]
        self._stage, self._rules = stage, rules
        self._index = kind([rule.old for rule in rules])

    def apply(self, name: str, run: _Run) -> str | None:
        todo = self._index.find(name)
        while todo:
            rule, start = self._rules[todo[0]], self._start(name, self._rules[todo[0]].old)
            end = start + len(rule.old)
            inside = is_inside(name, start, end)
            if rule.new is None:
                run.steps.append(Step(self._stage, str(rule), name, None, inside=inside))
                return None
            if rule.repeats and (self._stage, rule.number) not in run.free and rule.is_own_output(name, start):
                run.hold(self._stage, rule, name)
            elif rule.new != rule.old:
                after = name[:start] + rule.new + name[end:]
                run.steps.append(Step(self._stage, str(rule), name, after, inside=inside))
                name = after
                todo = [number for number in self._index.find(name) if number >= todo[0]]
                if todo and todo[0] > rule.number:
                    continue
            todo = [number for number in todo if number > rule.number]
        return name


class _StackedRules:
    """Found by their rarest component: rules that name every layer all begin alike."""

    def __init__(self, rules: Sequence[Stacked]) -> None:
        common = Counter(part for rule in rules for part in rule.parts)
        self._by_part: dict[str, list[tuple[Stacked, int]]] = defaultdict(list)
        for rule in rules:
            anchors = [at for at, part in enumerate(rule.parts) if part != "*"]
            anchor = min(anchors, key=lambda at: common[rule.parts[at]])
            self._by_part[rule.parts[anchor]].append((rule, anchor))

    def hits(self, name: str, run: _Run, *, loose: bool) -> Iterator[tuple[Stacked, int]]:
        """Rules that match ``name`` and where, the most specific first; at each rule's first place only.

        ``loose`` also lets a rule's last component match before an underscore.
        """
        parts = name.split(".")
        found: dict[int, tuple[tuple[bool, int, int, int, int], Stacked, int]] = {}
        for place, part in enumerate(parts):
            for rule, anchor in self._at(part, loose):
                at = place - anchor
                if at < 0 or rule.number in found:
                    continue
                exact = tuple(parts[at : at + len(rule.parts)])
                if not _matches(rule.parts, exact, loose):
                    continue
                if _is_own_output(rule, parts, at) and ("stacked", rule.number) not in run.free:
                    run.hold("stacked", rule, name)
                    continue
                whole = _matches(rule.parts, exact, loose=False)
                found[rule.number] = ((whole, len(rule.parts), len(rule.old), at, rule.number), rule, at)
        for _, rule, at in sorted(found.values(), key=lambda hit: hit[0], reverse=True):
            yield rule, at

    def _at(self, part: str, loose: bool) -> list[tuple[Stacked, int]]:
        """Rules that ``part`` can belong to, and as their which component."""
        rules = self._by_part.get(part, [])
        if loose and "_" in part:
            for at, letter in enumerate(part):
                if letter == "_" and part[:at] in self._by_part:
                    last = [each for each in self._by_part[part[:at]] if each[1] == len(each[0].parts) - 1]
                    rules = rules + last
        return rules


def _matches(parts: tuple[str, ...], found: tuple[str, ...], loose: bool) -> bool:
    if len(parts) != len(found):
        return False
    if not all(
        part == other or (part == "*" and other.isdecimal()) for part, other in zip(parts[:-1], found[:-1], strict=True)
    ):
        return False
    last, other = parts[-1], found[-1]
    return last == other or (last == "*" and other.isdecimal()) or (loose and other.startswith(f"{last}_"))


def _is_own_output(rule: Stacked, parts: list[str], at: int) -> bool:
    target, own = rule.target, rule.parts
    for offset in range(len(target) - len(own) + 1):
        if target[offset : offset + len(own)] == own and offset <= at:
            start = at - offset
            if tuple(parts[start : start + len(target)]) == target:
                return True
    return False
