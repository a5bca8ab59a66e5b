"""The index of a checkpoint in several shards: which tensor lies in which file.

``{"metadata": {"total_size": bytes}, "weight_map": {tensor name: file name}}``, as transformers writes it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamload.checkpoint.header import check_regular
from streamload.errors import CheckpointError


@dataclass(frozen=True)
class Index:
    """The content of one index file."""

    path: str
    weight_map: dict[str, str]
    total_size: int | None


def read_index(path: str) -> Index:
    """Read and check the index file ``path``.

    File names are judged by their text alone, before anything is opened: a plain name or a path below the folder is
    fine, everything else is refused. Links are followed later, as in Hugging Face caches, where they lead out of the folder.
    """
    check_regular(path)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=_distinct(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}", path=path) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        found = "none" if weight_map is None else repr(weight_map)[:40]
        raise CheckpointError(f"{path}: expected a weight_map of tensor names to files, found {found}", path=path)
    for tensor, file_name in weight_map.items():
        if reason := _refused(file_name):
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is mapped to {file_name!r}, {reason}", path=path, tensor=tensor
            )
    weight_map = {tensor: os.path.normpath(name) for tensor, name in weight_map.items()}  # one spelling for each file
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float):  # some writers divide
        total = int(total) if math.isfinite(total) else None
    return Index(path, weight_map, total if isinstance(total, int) else None)


def _distinct(path: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """A hook for JSON objects that accepts a key given twice only with equal values."""

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) == len(pairs):
            return table
        for name, value in pairs:
            if value != table[name]:
                raise CheckpointError(
                    f"{path}: {name!r} is there twice, with {value!r} and with {table[name]!r}; remove one of them",
                    path=path,
                    tensor=name,
                )
        return table

    return build


def _refused(name: object) -> str | None:
    """Why ``name`` cannot be the name of a shard."""
    if not isinstance(name, str):
        return "expected the name of a file"
    if not name.strip():
        return "which is empty"
    if "\0" in name:
        return "which holds a NUL character"
    if "\\" in name:
        return "which holds a back-slash"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", name):
        return "which is a URL or a drive, not a file in this folder"
    if name.startswith("/"):
        return "which is an absolute path; a shard lies in the folder of its index"
    if ".." in name.split("/"):
        return "which leaves the folder"
    return None
