"""``merge_lora``: merge a LoRA adapter (PEFT's format) into a stream of tensors, one by one."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from streamload.checkpoint import Checkpoint
from streamload.errors import LoadError, MappingError, SourceError
from streamload.sources.adapter import BASE_LAYER, PARTS, Adapter, plain_name
from streamload.sources.source import Source

_NEVER_STORED = re.compile(rf"(^|\.)({PARTS}|modules_to_save)(\.|$)")
_FUSED = re.compile("qkv|query_key_value|W_pack|gate_up|in_proj")


def merge_lora(
    source: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    adapter: str | os.PathLike[str],
    *,
    strip_base_layer: bool = False,
) -> Source:
    """``source``, lazily and in its order, with the LoRA adapter in the folder ``adapter`` merged into its tensors.

    ``source``: any iterable of (name, tensor), by stored names; its tensors may be lent. What the adapter does not change is
    passed on as it is. What it does becomes a new tensor of the same dtype, computed in float32 (float64 from float64); that
    takes the adapter's two matrices and 3 MiB beside it. ``adapter``: as PEFT saves it, with any scaling, DoRA, embeddings,
    convolutions, biases and ``modules_to_save``. Its paths fit a stored name exactly, else as whole components at the end of
    one, or the other way round. ``strip_base_layer``: pass ``q_proj.base_layer.weight`` on as ``q_proj.weight``.

    Raises CheckpointError when the adapter is incomplete; LoadError when it cannot be merged, when a tensor has another shape or
    is quantised, and when the stream lacks what the adapter changes: before the first tensor where its names are known,
    else at its end; MappingError when a path fits several names. ``notes`` tells at the end what was merged.
    """
    try:
        if isinstance(source, (str, os.PathLike, Checkpoint)):
            raise LoadError(
                f"source: expected a stream of (name, tensor), found {source!r}; streamload.stream opens it"
            )
        return _Merged(source, Adapter(os.fspath(adapter)), strip_base_layer)
    except BaseException:
        _close(source)
        raise


class _Match:
    """Which stored name is which of the adapter's paths."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._ends: dict[str, list[str]] = defaultdict(list)
        for target in adapter.changes:
            for end in _ends(target):
                self._ends[end].append(target)
        self.targets: dict[str, str | None] = {}
        """Stored name -> what the adapter changes there, of all names so far."""
        self.stored: dict[str, str] = {}

    def add(self, names: Collection[str]) -> None:
        """Take in ``names``, those that fit exactly first. Raises LoadError and MappingError."""
        plain = {name: plain_name(name) for name in names}
        for name, short in sorted(plain.items(), key=lambda item: item[1] not in self._adapter.changes):
            if _NEVER_STORED.search(name):
                raise LoadError(
                    f"{name!r} in the stream is itself part of an adapter, beside {self._adapter.file}; expected a base "
                    "checkpoint: leave such tensors out of the stream"
                )
            self.targets[name] = target = self._target(name, short)
            if target is not None and (first := self.stored.setdefault(target, name)) != name:
                raise MappingError(
                    f"{self._adapter.file}: {target!r} fits two tensors of the stream, {first!r} and {name!r}; rename one "
                    "(one that has the very name wins only where the source has .names)"
                )

    def _target(self, name: str, short: str) -> str | None:
        if short in self._adapter.changes:
            return short
        longest = next((end for end in _ends(short) if end in self._adapter.changes), None)
        fitting = [*([longest] if longest else []), *self._ends.get(short, ())]
        fitting = [
            each for each in fitting if plain_name(self.stored.get(each, "")) != each
        ]  # the name it has is exact
        if len(fitting) > 1:
            raise MappingError(f"{self._adapter.file}: {name!r} in the stream fits several: {_some(fitting)}")
        return fitting[0] if fitting else None

    def check(self) -> None:
        """Raise LoadError when the names so far lack what the adapter changes."""
        changes, stored = self._adapter.changes, self.targets
        if not (left := [target for target in changes if target not in self.stored]):
            return
        close = get_close_matches(left[0], stored, n=3, cutoff=0.3)
        hint = f"; closest to {left[0]!r}: {_some(close)}" if close else ""
        if any(fused and fused[0] not in left[0] for fused in map(_FUSED.search, close)):
            hint += ", which may hold it together with others: take them apart first"
        if all("new" in changes[target].keys for target in left):
            hint += "; the adapter has them whole (modules_to_save): if the base has none, add them to the stream"
        raise LoadError(
            f"{self._adapter.file}: {len(left) if self.stored else 'none'} of {len(changes)} tensors to change "
            f"{'did not come' if self.stored else 'came'}: {_some(left)}; the stream has {_some(stored)}"
            f"{hint}{self._adapter.origin}"
        )


class _Merged(Source):
    """The stream with the adapter merged in."""

    def __init__(self, source: Any, adapter: Adapter, strip: bool) -> None:
        super().__init__()
        self._source, self._adapter, self._strip = source, adapter, strip
        whole = hasattr(source, "items")
        self._items: Iterator[tuple[str, Tensor]] = iter(source.items() if whole else source)
        self._known = [*source] if isinstance(source, Mapping) else getattr(source, "names", None)
        self._match = _Match(adapter)
        self._begun = False
        self._skipped: frozenset[str] = frozenset()
        if self._known is not None:
            self.names = [self._passed(name) for name in self._known]
        if isinstance(source, Source):
            self.tally = source.tally
        self.lends = getattr(source, "lends", not whole)  # who does not say may lend
        self.look_ahead_bytes = getattr(source, "look_ahead_bytes", 0)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the source's buffers that cannot be reused, because somebody holds a tensor in them."""
        return int(getattr(self._source, "pinned_bytes", 0))

    def _passed(self, name: str) -> str:
        return BASE_LAYER.sub(r"\1", name) if self._strip else name

    def skip(self, names: Collection[str]) -> None:
        """Do not give ``names``; what the adapter changes there is not missing then. Raises SourceError once it has begun."""
        if self._begun:
            raise SourceError("tensors can be left out only before the first one is asked for")
        if self._known is not None and names:
            self._begin(self._known)
            self._skipped = frozenset(names)
            self.names = [name for name in self.names or () if name not in self._skipped]
            if isinstance(self._source, Source):
                self._source.skip([name for name in self._known if self._passed(name) in self._skipped])

    def _begin(self, known: Collection[str]) -> None:
        """All names are known: look where the adapter belongs, once."""
        if not self._match.targets:
            self._match.add(known)
            self._match.check()

    def __next__(self) -> tuple[str, Tensor]:
        if self.closed:
            self._end()
        try:
            item = self._step()
        except BaseException:
            self.close()
            raise
        if item is None:
            self._end()
        return item

    def _step(self) -> tuple[str, Tensor] | None:
        match, self._begun = self._match, True
        if self._known is not None:
            self._begin(self._known)
        for name, tensor in self._items:
            if self._passed(name) in self._skipped:
                continue
            if name not in match.targets:
                match.add([name])
            target = match.targets[name]
            return self._passed(name), tensor if target is None else self._adapter.apply(target, name, tensor)
        match.check()
        self.notes += [*getattr(self._source, "notes", ()), self._adapter.summary]
        return None

    def close(self) -> None:
        """Close the source."""
        if not self.closed:
            super().close()
            self._adapter.close()
            _close(self._items)


def _close(source: Any) -> None:
    if (close := getattr(source, "close", None)) is not None:
        close()


def _ends(name: str) -> list[str]:
    """The ends of ``name`` in whole components, two at least, the longest first."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts) - 1)]


def _some(names: Collection[str]) -> str:
    return ", ".join(map(repr, [*names][:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
