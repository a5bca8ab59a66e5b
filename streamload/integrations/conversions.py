"""transformers' own conversions of checkpoints, as placements: renames, merged experts, concatenations, splits, transposes."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamload.checkpoint import TensorSpec
from streamload.errors import LoadError
from streamload.integrations.gaps import lacks_a_kind, odd_one, whole_group, wrong_numbers
from streamload.loading.blocks import Untraceable
from streamload.loading.keys import Incomplete, Mismatch
from streamload.loading.naming import Route
from streamload.loading.operation import Operation
from streamload.loading.targets import Targets
from streamload.loading.tracing import Moved, trace
from streamload.mapping.rules import Place
from streamload.sources.dtypes import torch_dtype

#: What transformers drops besides the patterns of the class: buffers that older versions stored.
_STORED_BUFFERS = (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$"))


def conversions_of(module: nn.Module, targets: Targets) -> TransformersConversions | None:
    """The conversions of a transformers model; ``None`` when it is none, or when that library has no such thing."""
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    if not isinstance(module, PreTrainedModel):
        return None
    return TransformersConversions(module, targets, get_model_conversion_mapping(module))


class TransformersConversions:
    """Asks transformers what a stored name becomes, and traces what its operations do with a group of tensors."""

    def __init__(self, model: Any, targets: Targets, transforms: Sequence[Any]) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        self._model, self._targets = model, targets
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._natural = dot_natural_key
        self._home = dict.fromkeys(targets.known(), True)
        self._patterns: dict[str, dict[str, str]] = {}
        self._prefix: str = getattr(model, "base_model_prefix", "") or ""
        self._counts: Counter[str] = Counter()
        self._is_base = bool(self._prefix) and not hasattr(model, self._prefix)
        self._has_heads = False
        """Whether the checkpoint is of a model with a head and this is the model without."""
        self._ignored = _ignored(model, targets)
        self._may_miss = sorted(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())

    def sort(self, names: Sequence[str]) -> list[str]:
        """Numbers in their order, so that experts are merged in it."""
        for name in names:
            self._look_for_heads(name)
        return sorted(names, key=self._natural)

    def _look_for_heads(self, name: str) -> None:
        """A name with the base model's prefix, when this is the base model, tells that the checkpoint is of one with a head."""
        start = f"{self._prefix}."
        if not self._has_heads and self._is_base and name.startswith(start) and name[len(start) :] in self._home:
            self._has_heads = True

    def route(self, name: str) -> Route:
        """Where transformers puts the stored tensor ``name``."""
        self._look_for_heads(name)
        renamed, pattern = self._rename(name)
        if pattern is not None and renamed in self._home:
            self._patterns.setdefault(renamed, {})[name] = pattern
            return Route((), f"transformers' conversion of {pattern!r}", renamed)
        if renamed not in self._home and (rule := self._dropped(name, renamed)):
            return Route((), rule)
        self._count(name, renamed)
        return Route([Place(renamed)], "transformers' renaming" if renamed != name else "")

    def lands(self, name: str) -> bool:
        """Whether ``name`` finds its place in the model."""
        return self._rename(name)[0] in self._home

    def _rename(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        renamed: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._home
        )
        if renamed[0] not in self._home and name in self._home:
            renamed = rename_source_key(name, [], [], base_model_prefix=self._prefix, meta_state_dict=self._home)
        return renamed

    def _dropped(self, name: str, renamed: str) -> str:
        if renamed in self._targets.recomputed:
            return ""
        for pattern in self._ignored:
            if re.search(pattern, renamed):
                return f"transformers ignores {pattern!r}"
        is_head = self._has_heads and not name.startswith(f"{self._prefix}.")
        return f"outside {self._prefix + '.'!r}: a head, which the base model has not" if is_head else ""

    def _count(self, name: str, renamed: str) -> None:
        if renamed in self._home and renamed != name:
            self._counts["add"] += renamed == f"{self._prefix}.{name}"
            self._counts["strip"] += name == f"{self._prefix}.{renamed}"

    def convert(
        self, group: str, specs: Mapping[str, TensorSpec]
    ) -> dict[str, Moved] | Operation | Incomplete | Mismatch:
        """The tensors that the group becomes, or why it cannot be converted."""
        by_pattern = self._sorted_out(group, specs)
        converter = self._by_pattern[next(iter(by_pattern))]
        shape = self._targets.first(group).shape
        if (wrong := wrong_numbers(group, by_pattern, _experts(converter, shape))) is not None:
            return wrong
        try:
            made = self._made(group, specs, by_pattern)
        except LoadError as error:
            first = next(iter(specs.values()))
            told = lacks_a_kind(group, by_pattern, converter.source_patterns) or odd_one(group, by_pattern)
            return told or Mismatch(group, "what transformers can convert", str(error), first.file)
        if isinstance(made, dict) and group in made and made[group].shape != shape:
            return lacks_a_kind(group, by_pattern, converter.source_patterns) or odd_one(group, by_pattern) or made
        return made

    def foresee(self, group: str, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec] | None:
        """All tensors of the group by name, also those that have not come yet; ``None`` while they are not known."""
        by_pattern = self._sorted_out(group, specs)
        converter = self._by_pattern[next(iter(by_pattern))]
        if set(by_pattern) != set(converter.source_patterns):
            return None
        whole = whole_group(by_pattern, _experts(converter, self._targets.first(group).shape))
        if whole is None:
            return None
        self._patterns[group] |= {spec.name: pattern for pattern, members in whole.items() for spec in members}
        found = {spec.name: spec for members in whole.values() for spec in members}
        return {name: found[name] for name in sorted(found, key=self._natural)}

    def _sorted_out(self, group: str, specs: Mapping[str, TensorSpec]) -> dict[str, list[TensorSpec]]:
        """``specs`` by the pattern that they match."""
        by_pattern: dict[str, list[TensorSpec]] = {}
        for name, spec in specs.items():
            by_pattern.setdefault(self._patterns[group][name], []).append(spec)
        return by_pattern

    def _made(
        self, group: str, specs: Mapping[str, TensorSpec], by_pattern: Mapping[str, list[TensorSpec]]
    ) -> dict[str, Moved] | Operation:
        try:
            return trace(lambda tensors: self._run(group, tensors), by_pattern)
        except Untraceable as error:
            return self._operation(group, specs, by_pattern, error)

    def _run(self, group: str, tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._by_pattern[next(iter(tensors))])
        for pattern, values in tensors.items():
            converter.collected_tensors[pattern] = list(map(_ready, values))
        made: dict[str, Any] = converter.convert(group, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _operation(
        self,
        group: str,
        specs: Mapping[str, TensorSpec],
        by_pattern: Mapping[str, list[TensorSpec]],
        why: Untraceable,
    ) -> Operation:
        dtype = torch_dtype(self._targets.first(group).dtype)  # the library casts what it reads before it computes
        shapes = {
            pattern: [torch.empty(spec.shape, dtype=dtype, device="meta") for spec in members]
            for pattern, members in by_pattern.items()
        }
        try:
            targets = {name: tuple(value.shape) for name, value in self._run(group, shapes).items()}
        except Exception as error:
            names = ", ".join(list(specs)[:3])
            raise LoadError(
                f"transformers cannot make {group} of {names}{' and others' if len(specs) > 3 else ''}: "
                f"{type(error).__name__}: {error} (and it does more than move elements: {why})"
            ) from error
        kinds = dict.fromkeys(type(each).__name__ for each in self._by_pattern[next(iter(by_pattern))].operations)
        order: dict[str, list[str]] = {}
        for name in specs:
            order.setdefault(self._patterns[group][name], []).append(name)

        def run(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            inputs = {pattern: [tensors.pop(name).to(dtype) for name in names] for pattern, names in order.items()}
            return self._run(group, inputs)

        return Operation(f"{group} ({', '.join(kinds)} of transformers)", dict(specs), targets, run)

    def allow_missing(self, name: str) -> str | None:
        """The class's pattern for what a checkpoint need not store."""
        pattern = next((pattern for pattern in self._may_miss if re.search(pattern, name)), None)
        return None if pattern is None else f"transformers lets {pattern!r} be missing"

    def notes(self) -> list[str]:
        """Whether the base model's prefix was added or taken off."""
        verbs = {"add": "added to", "strip": "taken off"}
        return [
            f"prefix {self._prefix + '.'!r} {verbs[kind]} {count} names"
            for kind, count in self._counts.items()
            if count
        ]

    @property
    def prefix(self) -> str:
        """What was put before the names."""
        return f"{self._prefix}." if self._counts["add"] else ""


def _experts(converter: Any, shape: tuple[int, ...]) -> int | None:
    """How many experts the module has, when the conversion stacks them in the first dimension."""
    stacks, *others = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    alone = all(kind == "Concatenate" and dim != 0 for kind, dim in others)
    return shape[0] if stacks == ("MergeModulelist", 0) and alone and shape else None


def _ready(tensor: Tensor) -> Callable[[], Tensor]:
    """The library calls what it has not loaded yet."""
    return lambda: tensor


def _ignored(model: Any, targets: Targets) -> list[str]:
    """Patterns of stored names that the model does without."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [*targets.recomputed, *targets.specs]
    patterns |= {pattern for ending, pattern in _STORED_BUFFERS if any(name.endswith(ending) for name in buffers)}
    return sorted(patterns)
