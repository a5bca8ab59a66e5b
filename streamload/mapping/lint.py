"""Find rules that cannot do what they seem to say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from streamload.errors import MappingError
from streamload.mapping.explain import close_to, names_of
from streamload.mapping.rules import Expert, Mapped, ShardId, Stacked, Step, order_of_parts

if TYPE_CHECKING:
    from streamload.mapping.mapper import WeightsMapper


class Finding(NamedTuple):
    """Something suspicious about a mapper."""

    kind: str
    """``never-fires``, ``shadowed``, ``inside-component``, ``own-output``, ``not-in-module``, ``collision``, ``packed`` or
    ``parts``.
    """
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.rule}: {self.message}" if self.rule else f"{self.kind}: {self.message}"


def lint(mapper: WeightsMapper, names: Sequence[str], module: Any = None) -> list[Finding]:
    """Findings about ``mapper`` by itself, by what it does to ``names``, and in a ``module``."""
    if isinstance(names, str):
        raise MappingError(f"lint: expected a list of names, found the single string {names!r:.80}")
    findings = [*_by_themselves(mapper), *_against_packed(mapper, module)]
    if names:
        findings += _by_names(mapper, names, names_of(module))
    return sorted(findings, key=lambda finding: finding.kind == "own-output")  # those that do no harm come last


def _by_themselves(mapper: WeightsMapper) -> Iterator[Finding]:
    starts = str.startswith
    for stage, contains in (("substr", str.__contains__), ("prefix", starts), ("suffix", str.endswith)):
        table: Mapping[str, str | None] = getattr(mapper, f"orig_to_new_{stage}")
        yield from _shadowed(stage, table, contains)
        for old, new in table.items():
            if new is not None and old and old != new and old in new and (stage != "prefix" or starts(new, old)):
                yield Finding(
                    "own-output",
                    f"{stage} {old!r} -> {new!r}",
                    "would fire on its own output; held back, so harmless",
                )
        if stage == "prefix" and table.get(""):
            yield Finding(
                "own-output",
                f"prefix '' -> {table['']!r}",
                "would fire on its own output; held back, so harmless",
            )
    yield from _raw_stacked(mapper.stacked_rules)


def _shadowed(stage: str, table: Mapping[str, str | None], contains: Any) -> Iterator[Finding]:
    """Rules that an earlier one hides: where they could match, it has changed or dropped the text already."""
    earlier: list[str] = []
    for old, new in table.items():
        for first in earlier:
            changed = table[first]
            if first and contains(old, first) and (changed is None or not contains(changed + old[len(first) :], old)):
                if stage == "substr" and changed is not None and old in old.replace(first, changed, 1):
                    continue
                yield Finding(
                    "shadowed",
                    f"{stage} {old!r} -> {new!r}",
                    f"the rule {first!r} -> {changed!r} before it takes every name that it could match; put it first",
                )
                break
        earlier.append(old)


def _raw_stacked(rules: Sequence[Stacked]) -> Iterator[Finding]:
    """Stacked rules that cascade where text is matched raw, and pairs that match the same components."""
    seen: dict[tuple[str, ...], Stacked] = {}
    targets: dict[tuple[str, ...], list[Stacked]] = defaultdict(list)
    for rule in rules:
        targets[rule.target].append(rule)
        if rule.old in rule.new and rule.old != rule.new:
            yield Finding("own-output", f"stacked {rule}", "would fire on its own output; held back, so harmless")
        for other in rules:
            if other is not rule and other.number > rule.number and other.old in rule.new:
                yield Finding(
                    "own-output",
                    f"stacked {other}",
                    f"as raw text it would also hit what {rule.old!r} makes ({rule.new!r}); only whole components match "
                    "here, so it is harmless",
                )
        first = seen.setdefault(rule.parts, rule)
        if first is not rule:
            yield Finding(
                "shadowed", f"stacked {first}", f"{rule} matches the same components and comes later, so it wins"
            )

    for rule in rules:
        if (said := _letter(rule)) and rule.shard in ("q", "k", "v") and said != rule.shard:
            yield Finding("parts", f"stacked {rule}", f"{rule.parts[-1]!r} goes to part {rule.shard!r}, not {said!r}")
    for target, own in targets.items():
        parts, why = order_of_parts(part for rule in own for part in rule.own_parts)
        if why:
            yield Finding(
                "parts", "", f"{'.'.join(target)!r} is filled with parts {', '.join(map(repr, parts))}: {why}"
            )


def _letter(rule: Stacked) -> str:
    """The part that the name of a stored tensor suggests, such as q for ``q_proj``."""
    last = next((part for part in reversed(rule.parts) if part not in ("weight", "bias", "*")), "")
    words = {"query": "q", "key": "k", "value": "v"}
    first = last.split("_")[0]
    return words.get(first, first if first in words.values() else "")


def _by_names(mapper: WeightsMapper, names: Sequence[str], home: set[str] | None) -> Iterator[Finding]:
    fired: set[tuple[str, str]] = set()
    held: dict[tuple[str, str], str] = {}
    inside: dict[tuple[str, str], str] = {}
    sources: dict[Mapped, list[str]] = defaultdict(list)
    for name in names:
        places, steps = mapper.places(name, None if home is None else home.__contains__)
        for step in steps:
            rule = step.stage, step.rule
            if step.after != step.before or (home is None and step.stage == "split"):
                fired.add(rule)
            else:
                held.setdefault(rule, f" ({step.why})")
            if step.inside:
                inside.setdefault(rule, step.before)
        for place in places:
            sources[_hashable(Mapped(place.name, place.shard))].append(name)
            if home is not None and place.name not in home:
                yield _homeless(name, Mapped(place.name, place.shard), steps, home)
    for rule in mapper.rules():
        if rule not in fired:
            yield Finding(
                "never-fires", " ".join(rule), f"it changes none of the {len(names):,} names{held.get(rule, '')}"
            )
    for glob in mapper.transposed:
        if not any(fnmatchcase(name, glob) for name in names):
            yield Finding("never-fires", f"transposed {glob!r}", f"it matches none of the {len(names):,} names")
    for rule, name in inside.items():
        yield Finding("inside-component", " ".join(rule), f"it hits inside a component of {name!r}")
    for mapped, those in sources.items():
        if len(those) > 1:
            yield Finding("collision", "", f"{those[0]!r} and {those[1]!r} both map to {_show(mapped)}")


def _homeless(name: str, mapped: Mapped, steps: Sequence[Step], home: set[str]) -> Finding:
    rule = next((f"{step.stage} {step.rule}" for step in reversed(steps) if step.after != step.before), "")
    close = ", ".join(close_to(mapped.name, home))
    return Finding(
        "not-in-module",
        rule,
        f"{name!r} maps to {mapped.name!r}, which the module does not have{f' (close: {close})' if close else ''}",
    )


def _against_packed(mapper: WeightsMapper, module: Any) -> Iterator[Finding]:
    """Compare the stacked rules with what the module's class says it packs."""
    packed: Any = getattr(module, "packed_modules_mapping", None)
    if not isinstance(packed, Mapping) or not mapper.stacked_rules:
        return
    packed = {fused.rpartition(".")[2]: parts for fused, parts in packed.items()}
    by_target: dict[str, set[str]] = defaultdict(set)
    for rule in mapper.stacked_rules:
        by_target[_leaf(rule.target)].add(_leaf(rule.parts))
    for fused, parts in packed.items():
        named, last = by_target.get(fused), {part.rpartition(".")[2] for part in parts}
        if named is None:
            yield Finding("packed", "", f"packed_modules_mapping packs {fused!r}, but no stacked rule fills it")
        elif named != last and not (len(parts) == 1 and last == {fused}):
            yield Finding(
                "packed",
                "",
                f"packed_modules_mapping makes {fused!r} of {sorted(last)}, the stacked rules of {sorted(named)}",
            )
    for fused in by_target.keys() - packed.keys():
        yield Finding("packed", "", f"stacked rules fill {fused!r}, which packed_modules_mapping does not list")


def _leaf(parts: Sequence[str]) -> str:
    """The module's own name: the last component that is not a tensor's."""
    named = [part for part in parts if part not in ("weight", "bias")]
    return named[-1] if named else parts[-1]


def _hashable(mapped: Mapped) -> Mapped:
    shard: ShardId | None = mapped.shard
    return mapped._replace(shard=tuple(shard) if isinstance(shard, list) else shard)


def _show(mapped: Mapped) -> str:
    if mapped.shard is None:
        return repr(mapped.name)
    part = tuple(mapped.shard) if isinstance(mapped.shard, Expert) else mapped.shard
    return f"{mapped.name!r} part {part!r}"
