"""What a sentence-transformers folder says about itself: which modules a text passes, and how they are set."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from streamload.errors import LoadError


@dataclass(frozen=True)
class Recipe:
    """How a folder turns hidden states into vectors."""

    body: str
    """Folder of the transformers model."""
    normalise: bool
    max_tokens: int | None
    applied: tuple[str, ...]
    """Every module of the folder, as it was understood."""


def read_recipe(folder: str) -> Recipe:
    """Read ``modules.json`` and what it points to; a folder without one gets mean pooling and no normalisation.

    Raises LoadError, with the path, for a module or a setting that streamload does not know: leaving one out would give
    other vectors without a word.
    """
    path = os.path.join(folder, "modules.json")
    if not os.path.exists(path):
        return Recipe(folder, False, None, ("Transformer", "Pooling (mean, no modules.json says otherwise)"))
    body, pooled, normalised, applied = folder, False, False, []
    modules = _json(path)
    if not isinstance(modules, list):
        raise LoadError(f"{path}: expected a list of modules")
    for position, module in enumerate(modules):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        path_inside = module.get("path") if kind else None
        place = os.path.join(folder, path_inside) if path_inside and isinstance(path_inside, str) else folder
        if kind == "Transformer" and position == 0:
            body = place
            applied.append(kind)
        elif kind == "Pooling" and applied and not pooled:
            pooled = True
            applied.append(f"{kind} ({_pooling_mode(os.path.join(place, 'config.json'))})")
        elif kind == "Normalize" and pooled and not normalised:
            normalised = True
            applied.append(kind)
        else:
            raise LoadError(
                f"{path}: module {position} is {kind or module!r}, which this version cannot apply; leaving it out would "
                "give other vectors"
            )
    if not pooled:
        raise LoadError(f"{path}: names no Pooling module, so there is no vector for a text")
    _refuse_settings(os.path.join(folder, "config_sentence_transformers.json"), "default_prompt_name", "truncate_dim")
    max_tokens = _refuse_settings(os.path.join(body, "sentence_bert_config.json"), "do_lower_case").get(
        "max_seq_length"
    )
    return Recipe(body, normalised, max_tokens if isinstance(max_tokens, int) else None, tuple(applied))


def _refuse_settings(path: str, *keys: str) -> dict[str, Any]:
    """The settings in the file ``path``, none if it is not there; one of ``keys`` among them is an error."""
    settings = _object(path) if os.path.exists(path) else {}
    for key in keys:
        if settings.get(key):
            raise LoadError(
                f"{path}: sets {key} to {settings[key]!r}, which this version cannot apply; leaving it out would give "
                "other vectors"
            )
    return settings


def _pooling_mode(path: str) -> str:
    config = _object(path)
    mode = config.get("pooling_mode") or [
        key.removeprefix("pooling_mode_").removesuffix("_tokens")
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    modes = [mode] if isinstance(mode, str) else mode
    if modes != ["mean"]:
        raise LoadError(f"{path}: pooling mode {modes}, this version knows mean")
    return "mean"


def _object(path: str) -> dict[str, Any]:
    value = _json(path)
    if not isinstance(value, dict):
        raise LoadError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def _json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise LoadError(f"{path}: not valid JSON: {error}") from error
