"""Buffers and plain tensor attributes that no checkpoint stores: compare them with a fresh model's, and put them right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from streamload.errors import LoadError
from streamload.loading.skeleton import skeleton
from streamload.loading.targets import Targets, is_solid, own_attributes
from streamload.sources.dtypes import CODES

#: How many containers are opened one inside the other.
_DEEPEST = 4


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


def audit_buffers(model: nn.Module, factory: Callable[[], nn.Module], *, exact_dtype: bool = False) -> list[Spoiled]:
    """The non-persistent buffers and plain tensor attributes of ``model`` that differ from a freshly built model's.

    ``factory`` builds that model, with the same configuration; it is called inside ``skeleton()``, so it takes hardly any
    memory. Values are compared bit for bit, after a cast where ``model`` was cast to another float dtype; ``exact_dtype``
    finds those casts as well, such as rotary tables that ``model.half()`` has rounded. Tensors in lists, tuples and dicts
    are looked at; what only ``model`` has is not, unless it is on meta. What ``factory`` computes from a parameter cannot be
    checked and is listed as such. Raises LoadError when ``factory`` builds something else.
    """
    return [Spoiled(slot.name, slot.kind, why) for slot, _, why in _compare(model, factory, exact_dtype)]


def restore_buffers(model: nn.Module, factory: Callable[[], nn.Module], *, exact_dtype: bool = False) -> list[Spoiled]:
    """Put right what ``audit_buffers`` finds, and return it. With ``exact_dtype`` they get back the dtype of a fresh model.

    Raises LoadError when there is nothing to restore, which mostly means that the wrong model was given, when something
    cannot be restored, and when ``factory`` builds something else.
    """
    found = _compare(model, factory, exact_dtype)
    if stuck := [f"{slot.name} ({why})" for slot, right, why in found if right is None]:
        raise LoadError(f"{len(stuck)} tensors of {type(model).__name__} cannot be restored: {', '.join(stuck[:8])}")
    if not found:
        raise LoadError(_nothing(model, exact_dtype))
    device = next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))
    spoiled = {slot.name for slot, _, _ in found}
    fine = {id(slot.tensor) for slot in _slots(model) if slot.name not in spoiled}
    wanted: dict[int, set[int]] = defaultdict(set)
    for slot, right, _ in found:
        wanted[id(slot.tensor)].add(id(right))
    made: dict[tuple[int, int], Tensor] = {}  # tensors that modules share stay shared, if a fresh model shares them
    todo = [(slot, slot.tensor, right) for slot, right, _ in found]
    for slot, old, right in todo:
        assert right is not None
        key = id(old), id(right)
        if key not in made:
            alone = len(wanted[id(old)]) == 1 and id(old) not in fine
            made[key] = _put_right(old, right, device, exact_dtype, alone=alone)
        slot.holder[slot.key] = made[key]
    return [Spoiled(slot.name, slot.kind, why) for slot, _, why in found]


def stranded(targets: Targets) -> list[str]:
    """Non-persistent buffers and plain tensor attributes on the meta device, where nobody will ever compute them."""
    slots = (slot for dotted, owner in targets.holders for slot in _attributes(dotted, owner))
    return [*targets.stranded, *(slot.name for slot in slots if slot.tensor.is_meta)]


def _nothing(model: nn.Module, exact_dtype: bool) -> str:
    equal = (
        "equal those of a fresh model"
        if exact_dtype
        else "equal those of a fresh model, in the dtypes that they have here"
    )
    hint = "" if exact_dtype else "; exact_dtype=True undoes casts as well"
    return (
        f"nothing to restore in {type(model).__name__}: all {len(_slots(model))} of its non-persistent buffers and tensor "
        f"attributes {equal}{hint}"
    )


def _compare(
    model: nn.Module, factory: Callable[[], nn.Module], exact_dtype: bool
) -> list[tuple[_Slot, Tensor | None, str]]:
    """Every slot that is spoiled, the value that belongs there (``None`` when nobody knows it), and why."""
    donor = _build(factory)
    _check_structure(model, donor)
    fresh = {slot.name: slot.tensor for slot in _slots(donor)}
    ours = {slot.name: slot for slot in _slots(model)}
    if lacking := sorted(fresh.keys() - ours.keys()):
        raise LoadError(
            f"{type(model).__name__} lacks {', '.join(lacking[:5])}, which factory's {type(donor).__name__} has"
        )
    found: list[tuple[_Slot, Tensor | None, str]] = []
    for name, slot in ours.items():
        right = fresh.get(name)
        if right is None:
            found += (
                [(slot, None, "on the meta device, and a fresh model does not have it")] if slot.tensor.is_meta else []
            )
        elif why := _difference(slot.tensor, right, exact_dtype):
            found.append((slot, None if right.is_meta else right, why))
    return found


def _build(factory: Callable[[], nn.Module]) -> nn.Module:
    if isinstance(factory, nn.Module) or not callable(factory):
        raise LoadError(
            "factory: expected a function that builds the model anew, such as lambda: Model(config), found "
            f"{type(factory).__name__}"
        )
    with skeleton():
        donor = factory()
    if not isinstance(donor, nn.Module):
        raise LoadError(f"factory: expected it to build a module, found {type(donor).__name__}")
    return donor


def _check_structure(model: nn.Module, donor: nn.Module) -> None:
    ours, theirs = ({name for name, _ in each.named_modules()} for each in (model, donor))
    if apart := sorted(ours ^ theirs):
        raise LoadError(
            f"factory builds a {type(donor).__name__} of another structure than this {type(model).__name__}: "
            f"{len(apart)} modules are in one of them only: {', '.join(apart[:5])}"
        )
    fresh = _shapes(donor)
    wrong = [(name, shape, fresh[name]) for name, shape in _shapes(model).items() if fresh.get(name, shape) != shape]
    if wrong:
        name, shape, other = wrong[0]
        raise LoadError(
            f"factory builds a {type(donor).__name__} of other sizes than this {type(model).__name__}: {len(wrong)} parameters "
            f"differ, such as {name} {list(shape)}, a fresh one has {list(other)}; build it with the same configuration"
        )


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters() if not is_lazy(parameter)}


def _difference(ours: Tensor, right: Tensor, exact_dtype: bool) -> str:
    """Why ``ours`` is wrong; empty when it is right."""
    if right.is_meta:
        return "computed from a parameter, so a skeleton does not have it either"
    if ours.is_meta:
        return "on the meta device"
    if ours.shape != right.shape:
        return f"shape {list(ours.shape)}, a fresh one has {list(right.shape)}"
    both_float = ours.is_floating_point() and right.is_floating_point()
    if ours.dtype != right.dtype and (exact_dtype or not both_float):
        return f"{ours.dtype}, a fresh one has {right.dtype}"
    wanted, found = right.detach().cpu().to(ours.dtype), ours.detach().cpu()
    if _same(wanted, found):
        return ""
    if CODES.get(found.dtype) == "F4":
        return "values differ"  # torch cannot compute with it
    if found.isnan().any() and not wanted.isnan().any():
        return f"{int(found.isnan().sum())} of {found.numel()} values are NaN"
    apart = (wanted.to(torch.complex128) - found.to(torch.complex128)).abs()
    return f"values differ by up to {apart.nan_to_num(nan=float('inf')).max().item():g}"


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether the bytes are equal, so that NaN equals itself."""
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _put_right(old: Tensor, right: Tensor, device: torch.device, exact_dtype: bool, *, alone: bool) -> Tensor:
    """``old`` with the values of ``right``, or a new tensor where ``old`` cannot hold them, or others need it as it is."""
    both_float = old.is_floating_point() and right.is_floating_point()
    dtype = old.dtype if both_float and not exact_dtype else right.dtype
    if not alone or old.is_meta or old.shape != right.shape or old.dtype != dtype or not is_solid(old):
        return right.detach().to(device=device if old.is_meta else old.device, dtype=dtype, copy=True)
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
            if isinstance(found := owner._buffers.get(key), Tensor) and _is_plain(found)
        ]
        slots += _attributes(dotted, owner)
    return slots


def _attributes(dotted: str, owner: nn.Module) -> Iterator[_Slot]:
    for key in own_attributes(owner):
        yield from _inside(dotted + key, owner.__dict__[key], owner.__dict__, key)


def _inside(name: str, value: Any, holder: Any, key: Any, depth: int = 0) -> Iterator[_Slot]:
    """The tensor itself, or those in plain lists, tuples and dicts."""
    if isinstance(value, nn.Parameter):
        return
    if isinstance(value, Tensor):
        if _is_plain(value):
            yield _Slot(name, "attribute", holder, key)
    elif type(value) in (list, dict, tuple) and depth < _DEEPEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inside = _Tuple(holder, key) if isinstance(value, tuple) else value
        for inner, each in list(items):
            if isinstance(each, (Tensor, list, dict, tuple)):
                yield from _inside(f"{name}[{inner!r}]", each, inside, inner, depth + 1)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements can be looked at: not quantized, sparse or nested."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


@dataclass
class _Tuple:
    """A tuple whose elements can be replaced: another takes its place."""

    holder: Any
    key: Any

    def __getitem__(self, at: Any) -> Any:
        return self.holder[self.key][at]

    def __setitem__(self, at: int, value: Tensor) -> None:
        items = self.holder[self.key]
        self.holder[self.key] = (*items[:at], value, *items[at + 1 :])
