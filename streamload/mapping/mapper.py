"""WeightsMapper: rules from a checkpoint's names to a module's, in vLLM's keywords and order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypeVar

from streamload.errors import MappingError
from streamload.mapping.composed import Named, named
from streamload.mapping.engine import Engine, Reading
from streamload.mapping.lint import Finding, lint
from streamload.mapping.rules import AtHome, Literal, Pattern, ShardId, Split, Stacked, check_shard, text_of

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class WeightsMapper(Named):
    """Renames a checkpoint's tensors to a module's parameters. Rules are applied to a name stage by stage, in this order:

    ``orig_to_new_renaming``  objects with ``rename_source_key(name)``, such as transformers' WeightRenaming
    ``orig_to_new_regex``     pattern -> replacement, for every match
    ``orig_to_new_substr``    text -> replacement, at its first place
    ``orig_to_new_stacked``   component(s) -> (fused parameter, part); at most one fires, the most specific
    ``orig_to_new_prefix``    beginning -> replacement
    ``orig_to_new_suffix``    end -> replacement

    Inside a stage the rules run in the order given, and each sees the name as those before it left it. All but stacked ones
    match raw text; ``None`` as a replacement drops the tensor. Mappers written for vLLM 0.32 can be copied over. Two
    things differ, so that nothing cascades: a rule never fires on text that it would itself produce, and stacked rules
    match whole components (the leading and trailing dots of a rule do not matter), also at the start of a name.

    A part is a str or an int, a tuple (the tensor spans these neighbouring parts), or a list (each part gets the whole
    tensor). A component ``*`` in a stacked rule is the number of an expert, which becomes the index in the first dimension
    of the fused parameter; its part may be ``None`` when experts are only stacked, not fused.

    ``split``: component(s) -> the components of several parameters, over which the stored tensor is spread along its
    first dimension, in that order, when the module has them. ``transposed``: globs of stored names whose last two
    dimensions are swapped on the way. Raises MappingError when a rule is not one.
    """

    orig_to_new_renaming: Sequence[Any] = ()
    orig_to_new_regex: Mapping[str | re.Pattern[str], str | None] = field(default_factory=dict)
    orig_to_new_substr: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_stacked: Mapping[str, tuple[str, ShardId | None]] = field(default_factory=dict)
    orig_to_new_prefix: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_suffix: Mapping[str, str | None] = field(default_factory=dict)
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)
    transposed: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check(self)
        self._engine  # noqa: B018  compiled now, so that a wrong rule is told here

    @cached_property
    def _engine(self) -> Engine:
        return Engine(
            self.orig_to_new_renaming,
            [Pattern.make(number, *rule) for number, rule in enumerate(self.orig_to_new_regex.items())],
            _literals(self.orig_to_new_substr),
            self.stacked_rules,
            _literals(self.orig_to_new_prefix),
            _literals(self.orig_to_new_suffix),
        )

    @cached_property
    def stacked_rules(self) -> list[Stacked]:
        """The stacked rules, compiled."""
        rules = enumerate(self.orig_to_new_stacked.items())
        return [Stacked.make(number, old, new, shard) for number, (old, (new, shard)) in rules]

    @cached_property
    def split_rules(self) -> list[Split]:
        """The split rules, compiled."""
        rules = enumerate(self.split.items())
        return [Split(number, old, tuple(new), tuple(old.strip(".").split("."))) for number, (old, new) in rules]

    def transposes(self, name: str) -> bool:
        """Whether the last two dimensions of the stored tensor ``name`` are to be swapped."""
        return any(fnmatchcase(name, glob) for glob in self.transposed)

    @classmethod
    def like(cls, other: Any) -> WeightsMapper:
        """A mapper with the rules of another class's, which has them under the same keywords, as vLLM's has."""
        keywords = [each.name for each in fields(cls)]
        return cls(**{name: getattr(other, name) for name in keywords if hasattr(other, name)})

    def rules(self) -> Iterator[tuple[str, str]]:
        """Every rule as (stage, text)."""
        yield from (("renaming", str(rule)) for rule in self.orig_to_new_renaming)
        yield from (("regex", str(Pattern.make(0, *rule))) for rule in self.orig_to_new_regex.items())
        for stage in ("substr", "prefix", "suffix"):
            table = getattr(self, f"orig_to_new_{stage}")
            yield from ((stage, str(rule)) for rule in _literals(table) if rule.old != rule.new)
        yield from (("stacked", str(rule)) for rule in self.stacked_rules)
        yield from (("split", str(rule)) for rule in self.split_rules)

    def read(self, name: str, at_home: AtHome | None = None) -> Reading:
        """What becomes of ``name`` and how; ``at_home`` tells which names the module has, where it is known."""
        return self._engine.read(name, at_home)

    def __or__(self, other: Any) -> WeightsMapper:
        """The rules of both, those of ``other`` after ours. Raises MappingError when they say different things of one text."""
        other = _with_rules(other)
        for stage in _TABLES:
            ours, theirs = getattr(self, stage), getattr(other, stage)
            for old in _keys(ours).keys() & _keys(theirs).keys():
                if (first := _keys(ours)[old]) != (second := _keys(theirs)[old]):
                    raise MappingError(
                        f"{stage}: {old!r} becomes {first!r} in the one mapper and {second!r} in the other; "
                        "use first.override(second) to let the second win"
                    )
        return self.override(other)

    def override(self, other: Any) -> WeightsMapper:
        """The rules of both; where they say different things of one text, ``other`` wins, at the place of ours."""
        other = _with_rules(other)
        tables = {stage: _merged(getattr(self, stage), getattr(other, stage)) for stage in _TABLES}
        renaming = [*self.orig_to_new_renaming]
        renaming += [rule for rule in other.orig_to_new_renaming if rule not in renaming]
        transposed = list(dict.fromkeys([*self.transposed, *other.transposed]))
        return WeightsMapper(orig_to_new_renaming=renaming, transposed=transposed, **tables)

    def renames_only(self) -> WeightsMapper:
        """A mapper without stacked and dropping rules, for those who name modules instead of loading them: LoRA targets,
        the layer lists of quantisation configs.
        """
        kept: dict[str, Any] = {
            stage: {old: new for old, new in getattr(self, stage).items() if new is not None}
            for stage in _TABLES
            if stage not in ("orig_to_new_stacked", "split")
        }
        return replace(self, orig_to_new_stacked={}, split={}, transposed=(), **kept)

    def lint(self, names: Iterable[str] = (), module: Any = None) -> list[Finding]:
        """What is suspicious about the rules, judged by themselves and by what they do to ``names``.

        ``module`` (a module, its state_dict, or names) tells which results are at home, and its class's
        ``packed_modules_mapping`` is compared with the stacked rules.
        """
        return lint(self, names if isinstance(names, str) else list(names), module)


_TABLES = [
    each.name for each in fields(WeightsMapper) if each.name not in ("orig_to_new_renaming", "transposed")
]  # the stages whose rules are found by a key


def _with_rules(mapper: Any) -> WeightsMapper:
    """``mapper``, ours or vLLM's. Raises MappingError when it is neither, so that its rules cannot be merged."""
    found = named(mapper)
    if not isinstance(found, WeightsMapper):
        raise MappingError(
            f"expected another WeightsMapper to merge with, found {type(mapper).__name__}; "
            "use first.then(second) to ask one after the other"
        )
    return found


def _literals(table: Mapping[str, str | None]) -> list[Literal]:
    return [Literal.make(number, old, new) for number, (old, new) in enumerate(table.items())]


def _keys(table: Mapping[Any, Value]) -> dict[Any, Value]:
    """``table`` with patterns by their text, so that a compiled one equals one that is not."""
    return {text_of(old): new for old, new in table.items()}


def _merged(ours: Mapping[Any, Value], theirs: Mapping[Any, Value]) -> dict[Any, Value]:
    known = {text_of(old): old for old in ours}
    merged = dict(ours)
    for old, new in theirs.items():
        merged[known.get(text_of(old), old)] = new
    return merged


def _check(mapper: WeightsMapper) -> None:
    """Raise MappingError for what is not a rule."""
    for stage, kind in (
        ("split", Mapping),
        ("orig_to_new_stacked", Mapping),
        ("transposed", Sequence),
        ("orig_to_new_renaming", Sequence),
    ):
        if not isinstance(found := getattr(mapper, stage), kind) or isinstance(found, str):
            raise MappingError(
                f"{stage}: expected a {'dict' if kind is Mapping else 'list'}, found {type(found).__name__}"
            )
    for stage in ("orig_to_new_substr", "orig_to_new_prefix", "orig_to_new_suffix", "orig_to_new_regex"):
        table = getattr(mapper, stage)
        if not isinstance(table, Mapping):
            raise MappingError(f"{stage}: expected a dict of rules, found {type(table).__name__}")
        for old, new in table.items():
            text = text_of(old) if stage == "orig_to_new_regex" else old
            if not isinstance(text, str) or not (new is None or isinstance(new, str)):
                raise MappingError(f"{stage}: expected text -> text, or None to drop, found {old!r:.80} -> {new!r:.80}")
    if "" in mapper.orig_to_new_suffix:
        raise MappingError('orig_to_new_suffix: "" ends every name; use a regex rule with "$" to append to all of them')
    for old, rule in mapper.orig_to_new_stacked.items():
        if not (isinstance(old, str) and old.strip(".") and isinstance(rule, tuple) and len(rule) == 2):
            raise MappingError(f"orig_to_new_stacked: expected text -> (text, part), found {old!r:.80} -> {rule!r:.80}")
        check_shard(old, *rule)
    if wrong := [each for each in mapper.transposed if not isinstance(each, str)]:
        raise MappingError(f"transposed: expected globs of stored names, found {wrong[0]!r:.80}")
    for old, new in mapper.split.items():
        if not (
            isinstance(old, str)
            and old.strip(".")
            and isinstance(new, (list, tuple))
            and len(set(map(str, new))) == len(new)
        ):
            raise MappingError(f"split: expected text -> a list of different texts, found {old!r:.80} -> {new!r:.80}")
        if not all(isinstance(each, str) for each in new) or len(new) < 2:
            raise MappingError(f"split: expected text -> at least two texts, found {old!r:.80} -> {new!r:.80}")
    for rule in mapper.orig_to_new_renaming:
        if not hasattr(rule, "rename_source_key"):
            raise MappingError(f"orig_to_new_renaming: {type(rule).__name__} has no rename_source_key")
