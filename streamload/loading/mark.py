"""A module is marked while it is being loaded, so that nobody uses it by mistake when the load breaks off."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from streamload.errors import LoadError

MARK = "_streamload_partial"


class Mark:
    """A hook that refuses to run its module. Made so that a marked module can be copied and pickled."""

    def __init__(self, kind: str, why: str, names: Collection[str]) -> None:
        self.kind = kind
        self.why = why
        self.names = frozenset(names)
        """What has to be loaded, in full, before the mark comes off."""

    def __call__(self, *_: Any) -> None:
        raise LoadError(f"this {self.kind} is only partly loaded and cannot be used: {self.why}; load it again")


def mark(module: nn.Module, why: str, names: Collection[str]) -> None:
    """From now on ``module`` refuses to run, with ``why`` as the message, until ``names`` are loaded.

    Names that an earlier mark waits for stay. (A ScriptModule takes no hooks, so there only ``partial_load`` tells.)
    """
    earlier = marked(module)
    put(module, Mark(type(module).__name__, why, earlier.names.union(names) if earlier else names))


def settle(module: nn.Module, loaded: Collection[str], prefix: str = "") -> None:
    """Take the mark off if all that it waits for is among ``loaded``, where names begin with the module's ``prefix``."""
    found = marked(module)
    if found is not None:
        left = frozenset(name for name in found.names if prefix + name not in loaded)
        put(module, Mark(found.kind, found.why, left) if left else None)


def put(module: nn.Module, new: Mark | None) -> None:
    """Replace the mark of ``module``, if it has one, by ``new``. Ctrl-C finds the one or the other, or both."""
    if new is not None:
        module.__dict__[MARK] = new
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(new, prepend=True)
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, Mark) and hook is not new]:
        del hooks[key]
    if new is None:
        module.__dict__.pop(MARK, None)


def marked(module: nn.Module) -> Mark | None:
    """The mark of ``module``."""
    found = module.__dict__.get(MARK)
    return found if isinstance(found, Mark) else None


def partial_load(module: nn.Module) -> str | None:
    """Why ``module`` is only partly loaded, or ``None`` when it is not."""
    found = marked(module)
    return found.why if found is not None else None
