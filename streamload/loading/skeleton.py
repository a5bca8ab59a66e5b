"""Build a module without its weights: parameters on meta, everything else real."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parameter import is_lazy

_TWIN = "_streamload_twin"


@contextmanager
def skeleton() -> Iterator[None]:
    """Modules built inside hold their parameters on the meta device, where they take no memory.

    Buffers, non-persistent ones and plain tensor attributes included, are computed as usual, so that nothing has to be
    restored afterwards; ties between parameters stay ties. A parameter is moved when its module registers it:
    ``torch.nn`` does that before it draws initial values, so no memory is touched. Other threads are not affected.
    """
    thread = threading.get_ident()
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        stored = self._parameters.get(name)
        if stored is not None and threading.get_ident() == thread:
            self._parameters[name] = _on_meta(stored)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    if param.is_meta or is_lazy(param):
        return param
    twin = getattr(param, _TWIN, None)  # the same parameter registered a second time is a tie
    if twin is None:
        attributes = dict(param.__dict__)
        twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        twin.__class__ = param.__class__
        twin.__dict__.update(attributes)
        setattr(param, _TWIN, twin)
    assert isinstance(twin, nn.Parameter)
    return twin
