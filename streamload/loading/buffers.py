"""Buffers and plain tensor attributes that no checkpoint stores: compare them with a fresh model's, and put them right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streamload.errors import LoadError
from streamload.loading.skeleton import skeleton
from streamload.loading.targets import own_attributes


class Spoiled(NamedTuple):
    """A tensor that is not what a freshly built model has."""

    name: str
    kind: str
    """``buffer`` (non-persistent) or ``attribute``."""
    why: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.why}"


class _Slot(NamedTuple):
    """A place that holds a tensor."""

    name: str
    kind: str
    holder: Any
    key: Any

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = self.holder[self.key]
        return tensor


def audit_buffers(model: nn.Module, factory: Callable[[], nn.Module]) -> list[Spoiled]:
    """The non-persistent buffers and plain tensor attributes of ``model`` that differ from a freshly built model's.

    ``factory`` builds that model; it is called inside ``skeleton()``, so it takes hardly any memory. Values are compared bit
    for bit, after a cast where ``model`` was cast to another float dtype. What ``factory`` computes from a parameter cannot be
    checked and is listed as such. Raises LoadError when ``factory`` builds something else.
    """
    return [Spoiled(slot.name, slot.kind, why) for slot, _, why in _compare(model, factory)]


def restore_buffers(model: nn.Module, factory: Callable[[], nn.Module]) -> list[Spoiled]:
    """Put right what ``audit_buffers`` finds, and return it.

    Raises LoadError when there is nothing to restore, which mostly means that the wrong model was given, when something
    cannot be restored, and when ``factory`` builds something else.
    """
    found = _compare(model, factory)
    if stuck := [f"{slot.name} ({why})" for slot, right, why in found if right is None]:
        raise LoadError(f"{len(stuck)} tensors of {type(model).__name__} cannot be restored: {', '.join(stuck[:8])}")
    if not found:
        count = len(_slots(model))
        raise LoadError(
            f"nothing to restore in {type(model).__name__}: all {count} of its non-persistent buffers and tensor attributes "
            "equal those of a fresh model"
        )
    device = next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))
    made: dict[int, Tensor] = {}  # tensors that modules share stay shared
    for slot, right, _ in found:
        old = slot.tensor
        if id(old) not in made:
            made[id(old)] = _put_right(old, right, device)  # type: ignore[arg-type]
        slot.holder[slot.key] = made[id(old)]
    return [Spoiled(slot.name, slot.kind, why) for slot, _, why in found]


def stranded_attributes(owners: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Plain tensor attributes that are on the meta device, where nobody will ever compute them.

    ``owners``: modules with their dotted prefixes; those below them are not looked at.
    """
    slots = (slot for dotted, owner in owners for slot in _attributes(dotted, owner))
    return [slot.name for slot in slots if slot.tensor.is_meta]


def _compare(model: nn.Module, factory: Callable[[], nn.Module]) -> list[tuple[_Slot, Tensor | None, str]]:
    """Every slot that is spoiled, the value that belongs there (``None`` when nobody knows it), and why."""
    with skeleton():
        donor = factory()
    if not isinstance(donor, nn.Module):
        raise LoadError(f"factory: expected it to build a module, found {type(donor).__name__}")
    _check_structure(model, donor)
    fresh = {slot.name: slot for slot in _slots(donor)}
    ours = {slot.name: slot for slot in _slots(model)}
    if lacking := sorted(fresh.keys() - ours.keys()):
        raise LoadError(
            f"{type(model).__name__} lacks {', '.join(lacking[:5])}, which factory's {type(donor).__name__} has"
        )
    found = []
    for name, slot in ours.items():
        if name in fresh and (why := _difference(slot.tensor, fresh[name].tensor)):
            right = fresh[name].tensor
            found.append((slot, None if right.is_meta else right, why))
    return found


def _check_structure(model: nn.Module, donor: nn.Module) -> None:
    ours, theirs = ({name for name, _ in each.named_modules()} for each in (model, donor))
    if apart := sorted(ours ^ theirs):
        raise LoadError(
            f"factory builds a {type(donor).__name__} of another structure than this {type(model).__name__}: "
            f"{len(apart)} modules are in one of them only: {', '.join(apart[:5])}"
        )


def _difference(ours: Tensor, right: Tensor) -> str:
    """Why ``ours`` is wrong; empty when it is right."""
    if right.is_meta:
        return "computed from a parameter, so a skeleton does not have it either"
    if ours.is_meta:
        return "on the meta device"
    if ours.shape != right.shape:
        return f"shape {list(ours.shape)}, a fresh one has {list(right.shape)}"
    both_float = ours.is_floating_point() and right.is_floating_point()
    if ours.dtype != right.dtype and not both_float:
        return f"{ours.dtype}, a fresh one has {right.dtype}"
    wanted, found = right.detach().cpu().to(ours.dtype), ours.detach().cpu()
    if _same(wanted, found):
        return ""
    apart = (wanted.to(torch.complex128) - found.to(torch.complex128)).abs()
    return f"values differ by up to {apart.nan_to_num(nan=float('inf')).max().item():g}"


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether the bytes are equal, so that NaN equals itself."""
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _put_right(old: Tensor, right: Tensor, device: torch.device) -> Tensor:
    """``old`` with the values of ``right``, or a new tensor where ``old`` cannot hold them."""
    if old.is_meta or old.shape != right.shape:
        dtype = old.dtype if old.is_floating_point() and right.is_floating_point() else right.dtype
        return right.detach().to(device=device, dtype=dtype, copy=True)
    if old.dtype != right.dtype and not old.is_floating_point():
        return right.detach().to(device=old.device, copy=True)
    with torch.inference_mode(old.is_inference()), torch.no_grad():
        old.copy_(right)
    return old


def _slots(module: nn.Module) -> list[_Slot]:
    """Every place in ``module`` and below that holds a tensor which no checkpoint stores."""
    slots = []
    for path, owner in module.named_modules():
        dotted = f"{path}." if path else ""
        slots += [
            _Slot(dotted + key, "buffer", owner._buffers, key)
            for key in owner._non_persistent_buffers_set
            if isinstance(owner._buffers.get(key), Tensor)
        ]
        slots += _attributes(dotted, owner)
    return slots


def _attributes(dotted: str, owner: nn.Module) -> Iterator[_Slot]:
    for key in own_attributes(owner):
        yield from _inside(dotted + key, owner.__dict__[key], owner.__dict__, key)


def _inside(name: str, value: Any, holder: Any, key: Any) -> Iterator[_Slot]:
    """The tensor itself, or those in a plain list or dict."""
    if isinstance(value, nn.Parameter):
        return
    if isinstance(value, Tensor):
        yield _Slot(name, "attribute", holder, key)
    elif type(value) in (list, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for inner, each in list(items):
            if isinstance(each, Tensor) and not isinstance(each, nn.Parameter):
                yield _Slot(f"{name}[{inner!r}]", "attribute", value, inner)
