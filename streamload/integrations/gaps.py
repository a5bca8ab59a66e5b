"""What is wrong with a group of stored tensors that transformers would merge: experts that are missing, too many or odd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from streamload.checkpoint import TensorSpec
from streamload.loading.keys import Incomplete, Mismatch, short

Group = Mapping[str, Sequence[TensorSpec]]
"""The stored tensors of a group by the pattern that they match."""


def wrong_numbers(name: str, group: Group, count: int | None) -> Incomplete | Mismatch | None:
    """Experts of the parameter ``name`` that some pattern lacks, or that are more than ``count``, where that is known."""
    numbered = {pattern: found for pattern, specs in group.items() if (found := _numbered(pattern, specs))}
    if not numbered:
        return None
    numbers = set[int]().union(*numbered.values())
    if count is not None and max(numbers) >= count:
        spec = next(found[max(numbers)] for found in numbered.values() if max(numbers) in found)
        return Mismatch(name, f"{count} experts", f"number {max(numbers)} ({spec.name})", spec.file)
    first = 0 if count is not None else min(1, *numbers, max(numbers))
    wanted = range(first, count if count is not None else max(numbers) + 1)
    return _incomplete(name, wanted, numbered, list(numbered))


def whole_group(group: Group, count: int | None) -> dict[str, list[TensorSpec]] | None:
    """The group with all tensors that will come, where some of each pattern have: experts are alike. ``None`` when it is not
    known which.
    """
    if not any("*" in pattern for pattern in group):
        return {pattern: list(specs) for pattern, specs in group.items()}
    numbered = {pattern: _numbered(pattern, specs) for pattern, specs in group.items()}
    if count is None or not all(numbered.values()):
        return None
    return {
        pattern: [
            found.get(number) or next(iter(found.values()))._replace(name=_name(number, pattern, numbered))
            for number in range(count)
        ]
        for pattern, found in numbered.items()
    }


def lacks_a_kind(name: str, group: Group, patterns: Sequence[str]) -> Incomplete | None:
    """Patterns that no stored tensor of the group matches."""
    absent = [pattern for pattern in patterns if pattern not in group]
    if not absent:
        return None
    numbered = {pattern: found for pattern, specs in group.items() if (found := _numbered(pattern, specs))}
    if numbered and all("*" in pattern for pattern in absent):
        return _incomplete(name, sorted(set[int]().union(*numbered.values())), numbered, [*numbered, *absent])
    names = [_other_kind(specs[0].name, pattern, other) for other in absent for pattern, specs in group.items()]
    return Incomplete(name, short(list(group)), short(absent), short(list(dict.fromkeys(names))))


def odd_one(name: str, group: Group) -> Mismatch | None:
    """A stored tensor that has not the shape of the others of its kind."""
    for specs in group.values():
        shapes = Counter(spec.shape for spec in specs)
        usual = shapes.most_common(1)[0][0]
        for spec in specs:
            if spec.shape != usual:
                expected = f"shape {list(usual)}, which {shapes[usual]} others like it have"
                return Mismatch(name, expected, f"{spec.name} of shape {list(spec.shape)}", spec.file)
    return None


def _incomplete(
    name: str, wanted: Sequence[int], numbered: Mapping[str, Mapping[int, TensorSpec]], patterns: Sequence[str]
) -> Incomplete | None:
    missing, names, whole = [], [], []
    for number in wanted:
        absent = [pattern for pattern in patterns if number not in numbered.get(pattern, ())]
        if not absent:
            whole.append(f"expert {number}")
        elif len(absent) == len(patterns):
            missing.append(f"expert {number}")
        else:
            missing += [f"{_tail(pattern).strip('.')} of expert {number}" for pattern in absent]
        names += [_name(number, pattern, numbered) for pattern in absent]
    return Incomplete(name, short(whole), short(missing), short(names)) if missing else None


def _numbered(pattern: str, specs: Sequence[TensorSpec]) -> dict[int, TensorSpec]:
    """The tensors of one pattern by the number of their expert; none when it has no numbers."""
    if "*" not in pattern:
        return {}
    names = [spec.name.split(".") for spec in specs]
    at = _place(names)
    return {} if at is None else {int(name[at]): spec for name, spec in zip(names, specs, strict=True)}


def _place(names: Sequence[Sequence[str]]) -> int | None:
    """The component in which ``names`` are numbered: the one in which they differ, else the last number."""
    numbers = [at for at, part in enumerate(names[0]) if part.isdecimal()]
    if len({len(name) for name in names}) > 1:
        return None
    differ = [at for at in range(len(names[0])) if len({name[at] for name in names}) > 1]
    if not differ:
        return numbers[-1] if numbers else None
    [at, *others] = differ
    return at if not others and all(name[at].isdecimal() for name in names) else None


def _name(number: int, pattern: str, numbered: Mapping[str, Mapping[int, TensorSpec]]) -> str:
    """How the checkpoint would call the tensor of expert ``number`` that matches ``pattern``."""
    kind = pattern if pattern in numbered else next(iter(numbered))
    parts = [spec.name.split(".") for spec in numbered[kind].values()]
    at = _place(parts)
    assert at is not None
    name = ".".join([*parts[0][:at], str(number), *parts[0][at + 1 :]])
    return name if kind == pattern else _other_kind(name, kind, pattern)


def _other_kind(name: str, pattern: str, other: str) -> str:
    """``name``, which matches ``pattern``, as it would be called if it matched ``other``."""
    if (tail := _tail(pattern)) not in name:
        return _clean(other)
    start, _, end = name.rpartition(tail)
    return start + _tail(other) + end


def _tail(pattern: str) -> str:
    """What follows the number."""
    return _clean(pattern).rpartition("*")[2]


def _clean(pattern: str) -> str:
    return pattern.replace("\\.", ".").removeprefix("^").removesuffix("$")
