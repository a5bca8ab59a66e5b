"""Heads that pooling does without: find them, leave them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from streamload.errors import LoadError

#: What heads are called, where nothing else tells.
_HEADS = frozenset(
    {"lm_head", "embed_out", "score", "classifier", "classification_head", "qa_outputs", "logits_processor"}
)


class LeftOut(nn.Module):
    """Stands where a head was. It has no weights and cannot be used."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises LoadError."""
        raise LoadError(f"{self._title} was left out: this model was made for pooling, and its weights were not loaded")


def base_prefix(model: nn.Module) -> str:
    """The name of the base model inside ``model``, as transformers' classes tell it; ``"model"`` where nothing does."""
    return getattr(model, "base_model_prefix", "") or "model"


def find_heads(model: nn.Module) -> list[str]:
    """Dotted names of the heads of ``model``.

    Of a transformers model: all that lies beside its base model. Otherwise modules called like heads, at the top or beside a
    child that is called like the base model.
    """
    base = base_prefix(model)
    if hasattr(model, "base_model_prefix") and hasattr(model, "save_pretrained") and base in model._modules:
        return [name for name in model._modules if name != base]
    found = []
    for dotted, owner in model.named_modules():
        if not dotted or base in owner._modules:
            found += [f"{dotted}.{name}" if dotted else name for name in owner._modules if name in _HEADS]
    return found


def leave_out(model: nn.Module, heads: Sequence[str]) -> dict[str, str]:
    """Put something without weights in place of ``heads``; says which of their parameters were tied, and to what."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{head}.") for head in heads):
            names.setdefault(id(parameter), name)
    tied = {}
    for head in heads:
        path, _, key = head.rpartition(".")
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            owner = nn.Module()
        if key not in owner._modules:
            raise LoadError(f"heads: {type(model).__name__} has no module {head!r}")
        removed = owner._modules[key]
        for name, parameter in removed.named_parameters(head) if removed is not None else ():
            if id(parameter) in names:
                tied[name] = names[id(parameter)]
        owner._modules[key] = LeftOut(f"{head} of {type(model).__name__}")

    def outside(name: str) -> bool:
        return not any(name.startswith(f"{head}.") for head in heads)

    for listed in ("all_tied_weights_keys", "_tied_weights_keys"):  # transformers looks for them when it loads or saves
        ties = getattr(model, listed, None)
        if isinstance(ties, dict):
            if listed == "all_tied_weights_keys":  # the other lists those that could be tied
                tied |= {name: each for name, each in ties.items() if not outside(name) and each in names.values()}
            setattr(model, listed, {name: each for name, each in ties.items() if outside(name) and outside(each)})
    return tied
