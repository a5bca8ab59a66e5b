"""A module whose load broke off is marked, so that nobody uses it by mistake."""

from __future__ import annotations

from typing import Any

from torch import nn

from streamload.errors import LoadError

_ATTRIBUTE = "_streamload_partial"


def mark(module: nn.Module, why: str) -> None:
    """From now on ``module`` refuses to run, with ``why`` as the message, until a load succeeds."""
    unmark(module)

    def refuse(*_: Any) -> None:
        raise LoadError(f"this {type(module).__name__} is only partly loaded and cannot be used: {why}; load it again")

    handle = module.register_forward_pre_hook(refuse, prepend=True)
    module.__dict__[_ATTRIBUTE] = (why, handle)


def unmark(module: nn.Module) -> None:
    """Take the mark off."""
    stored = module.__dict__.pop(_ATTRIBUTE, None)
    if stored is not None:
        stored[1].remove()


def partial_load(module: nn.Module) -> str | None:
    """Why ``module`` is only partly loaded, or ``None`` when it is not."""
    stored = module.__dict__.get(_ATTRIBUTE)
    return stored[0] if stored is not None else None
