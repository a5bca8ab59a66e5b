"""Which files of a folder make up the checkpoint. A pure function of the names; nothing is opened here.

The order of preference: a safetensors index; ``model.safetensors``; one complete numbered family of safetensors; other
safetensors files together; the same for torch's ``.bin``, ``.pt`` and ``.pth``; ``consolidated*`` only when nothing else
is there. Adapters, optimizer and training state never count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from streamload.errors import CheckpointError

SAFETENSORS = (".safetensors",)
TORCH = (".bin", ".pt", ".pth")
INDEX = ".index.json"

_NEVER = {
    "adapter_*": "an adapter, not the model",
    "optimizer*": "optimizer state",
    "scheduler*": "training state",
    "training_args*": "training state",
    "rng_state*": "training state",
    "scaler*": "training state",
    "trainer_state*": "training state",
}
_FAMILY = re.compile(r"(?P<stem>.*?[-_.]?)(?P<number>\d{4,6})-of-(?P<total>\d{4,6})(?P<ending>(?:\.\w+)+)")
_VARIANT = re.compile(r"\.(fp16|bf16|fp32|float16|bfloat16|int8|int4|fp8|non_ema|ema)(?=[-.])")


@dataclass(frozen=True)
class Choice:
    """The files of a checkpoint, or the index that lists them, relative to the folder."""

    files: tuple[str, ...] = ()
    index: str | None = None
    ignored: dict[str, str] = field(default_factory=dict)
    """File that looks like weights -> why it was passed over."""


class _Family(NamedTuple):
    """What the names of numbered shards have in common."""

    stem: str
    digits: int
    total: str
    ending: str

    def is_complete(self, numbers: Collection[int]) -> bool:
        return len(numbers) == int(self.total) and not self.missing(numbers)

    def missing(self, numbers: Collection[int]) -> list[int]:
        """The numbers that are not there, counted from 0 where there is a shard 0."""
        first = 0 if 0 in numbers else 1
        return [number for number in range(first, first + int(self.total)) if number not in numbers]

    @property
    def is_variant(self) -> bool:
        return bool(_VARIANT.search(self.stem + self.ending))


def choose(names: Iterable[str], where: str) -> Choice:
    """Choose among the file ``names`` of the folder ``where`` (relative, ``/`` between folders).

    Raises CheckpointError when there are no weights, when the only family is incomplete, or when two are complete.
    """
    folder = _Folder(sorted(names, key=natural), where)
    for endings in (SAFETENSORS, TORCH):
        if found := folder.look_for(endings):
            return found
    raise CheckpointError(folder.nothing(), path=where)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which ``shard-2`` comes before ``shard-10``."""
    parts = (part for part in re.split(r"(\d+)", name) if part)
    # Of two numbers the one with more digits is larger; turning them into integers fails beyond 4,300 digits.
    return [(0, len(part.lstrip("0")), part.lstrip("0")) if part.isdecimal() else (1, 0, part) for part in parts]


class _Folder:
    def __init__(self, names: list[str], where: str) -> None:
        self._where = where
        self._ignored: dict[str, str] = {}
        self._names = [name for name in names if name.endswith((*SAFETENSORS, *TORCH, INDEX)) and not self._never(name)]

    def _never(self, name: str) -> bool:
        why = "in a sub-folder" if "/" in name else None
        why = why or next((why for pattern, why in _NEVER.items() if fnmatchcase(name, pattern)), None)
        if why:
            self._ignored[name] = why
        return why is not None

    def look_for(self, endings: tuple[str, ...]) -> Choice | None:
        """The checkpoint among files of one format; ``consolidated*`` (the original release's layout) comes last."""
        names = [name for name in self._names if name.endswith(endings) or _is_index(name, endings)]
        usual = [name for name in names if not name.startswith("consolidated")]
        for group in (usual, [name for name in names if name not in usual]):
            if found := self._index(group, endings) or self._files(group):
                return found
        return None

    def _index(self, names: list[str], endings: tuple[str, ...]) -> Choice | None:
        indexes = [name for name in names if _is_index(name, endings)]
        indexes = [name for name in indexes if not _VARIANT.search(name)] or indexes
        preferred = [name for name in indexes if name.startswith(("model.", "pytorch_model."))] or indexes
        if len(preferred) > 1:
            raise CheckpointError(
                f"{self._where}: several indexes ({', '.join(preferred)}); name the one you want instead of the folder",
                path=self._where,
            )
        return self._chosen((), preferred[0], f"the index {preferred[0]} decides") if preferred else None

    def _files(self, names: list[str]) -> Choice | None:
        single = [name for name in names if name in ("model.safetensors", "pytorch_model.bin")]
        if single:
            return self._chosen(single, None, f"{single[0]} is the whole checkpoint")
        families = self._families(names)
        if families:
            family = self._complete(families)
            return self._chosen(family, None, f"not part of {family[0]} and its family")
        loose = [name for name in names if not _is_index(name, (*SAFETENSORS, *TORCH))]
        plain = [name for name in loose if not _VARIANT.search(name)] or loose
        return self._chosen(plain, None, "another variant or format of the files taken") if plain else None

    def _families(self, names: list[str]) -> dict[_Family, dict[int, str]]:
        families: dict[_Family, dict[int, str]] = defaultdict(dict)
        for name in names:
            if match := _FAMILY.fullmatch(name):
                family = _Family(match["stem"], len(match["number"]), match["total"], match["ending"])
                families[family][int(match["number"])] = name
        return families

    def _complete(self, families: dict[_Family, dict[int, str]]) -> list[str]:
        complete = {key: members for key, members in families.items() if key.is_complete(members)}
        plain = {key: members for key, members in complete.items() if not key.is_variant} or complete
        if len(plain) > 1:
            stems = ", ".join(f"{members[min(members)]} ({len(members)} files)" for members in plain.values())
            raise CheckpointError(
                f"{self._where}: two complete sets of shards and no index to decide: {stems}; move one away or add an "
                "index",
                path=self._where,
            )
        if not plain:
            raise CheckpointError(f"{self._where}: {_incomplete(*next(iter(families.items())))}", path=self._where)
        return list(next(iter(plain.values())).values())

    def _chosen(self, files: Iterable[str], index: str | None, why: str) -> Choice:
        taken = {*files, index}
        rest = {name: why for name in self._names if name not in taken}
        return Choice(tuple(files), index, self._ignored | rest)

    def nothing(self) -> str:
        if not self._ignored:
            return f"{self._where}: no weights here (looked for *.safetensors, *.bin, *.pt, *.pth)"
        found = "; ".join(f"{name} is {why}" for name, why in list(self._ignored.items())[:5])
        return f"{self._where}: no weights here that make up a model: {found}"


def _incomplete(family: _Family, numbers: Collection[int]) -> str:
    shards, total = f"shards of {family.stem}*{family.ending}", int(family.total)
    missing = family.missing(numbers)
    if not missing:
        return f"{len(numbers)} {shards} are here, but their names say that there are {total}"
    shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return f"{total - len(missing)} of {total} {shards} are here, missing: {shown}; is the download incomplete?"


def _is_index(name: str, endings: tuple[str, ...]) -> bool:
    return name.endswith(tuple(ending + INDEX for ending in endings))
