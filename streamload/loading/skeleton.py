"""Build a module without its weights: parameters on meta, everything else real."""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def skeleton() -> Iterator[None]:
    """Modules built inside hold their parameters on the meta device, where they take no memory.

    Buffers, non-persistent ones and plain tensor attributes included, are computed as usual, so that nothing has to be
    restored afterwards; ties between parameters stay ties. A parameter is moved when its module registers it:
    ``torch.nn`` does that before it draws initial values, so no memory is touched. Other threads are not affected.
    """
    thread = threading.get_ident()
    twins: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()

    def move(_module: nn.Module, _name: str, param: nn.Parameter) -> nn.Parameter:
        if threading.get_ident() != thread or param.is_meta or is_lazy(param):
            return param
        if param not in twins:  # the same parameter registered a second time is a tie
            twins[param] = _on_meta(param)
        return twins[param]

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    twin.__class__ = param.__class__
    twin.__dict__ = param.__dict__  # one dict, so that attributes set on ``param`` later reach the module too
    return twin
