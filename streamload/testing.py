"""Small checkpoints and modules for tests, ours and yours."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streamload.memory.clones import count_clones
from streamload.sources.dtypes import dtype_code


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    pad: int = 0,
) -> str:
    """Write ``tensors`` in the order given (the safetensors library sorts them). Returns ``path``.

    ``pad`` spaces at the end of the header move the data, for tests of odd alignment.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        code = dtype_code(tensor.dtype)
        shape = list(tensor.shape)
        if code == "F4":
            shape[-1] *= 2
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    return write_raw(path, json.dumps(header).encode() + b" " * pad, map(tensor_bytes, tensors.values()))


def write_raw(
    path: str | os.PathLike[str], header: bytes, data: Iterable[bytes] = (), *, length: int | None = None
) -> str:
    """Write a safetensors file from a ready header, right or wrong. ``length`` replaces the true header length."""
    with open(path, "wb") as file:
        file.write((len(header) if length is None else length).to_bytes(8, "little") + header)
        file.writelines(data)
    return os.fspath(path)


def write_sharded(folder: str | os.PathLike[str], shards: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Write ``{file name: tensors}`` and the index that lists them into ``folder``, which is returned."""
    os.makedirs(folder, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for name, tensors in shards.items():
        write_safetensors(os.path.join(folder, name), tensors)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
    return os.fspath(folder)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of ``tensor`` in row-major order, whatever its dtype."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def module_of(tensors: Mapping[str, Tensor], *, buffers: Iterable[str] = ()) -> nn.Module:
    """A module whose parameters have these dotted names and are these tensors; ``buffers`` names those that are buffers."""
    root = nn.Module()
    wanted = set(buffers)
    for name, tensor in tensors.items():
        *path, key = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if name in wanted:
            owner.register_buffer(key, tensor)
        else:
            owner.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    return root


class RingSource:
    """A one-pass stream that lends ``slots`` buffers in turn: a tensor is overwritten when its slot comes round again.

    ``tensors``: what to stream, by name, in this order. What is read after its time is NaN, or the bytes 0xFF where a dtype has
    no NaN: slots are poisoned before they are reused, and all of them on close. ``steps`` counts how often it was asked,
    ``clones`` and ``clone_bytes`` how much was cloned out of it, by any thread.
    """

    lends = True

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], slots: int = 1) -> None:
        self._items = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
        self._slots = slots
        self._ring: list[Tensor] = []
        self.steps = 0
        self.closed = False
        ring = self._ring
        self._clones = count_clones(lambda tensor: _lies_in(tensor, ring))
        self._clones.__enter__()
        self._stop_counting = weakref.finalize(self, self._clones.__exit__)

    def __iter__(self) -> RingSource:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        if self.closed:
            raise StopIteration
        self.steps += 1
        try:
            name, tensor = next(self._items)
        except StopIteration:
            self.close()
            raise
        return name, self._lend(tensor)

    @property
    def clones(self) -> int:
        """Tensors that were cloned out of it."""
        return self._clones.count

    @property
    def clone_bytes(self) -> int:
        """Their bytes."""
        return self._clones.nbytes

    def close(self) -> None:
        """Poison everything that was lent."""
        self.closed = True
        self._stop_counting()
        for slot in self._ring:
            slot.fill_(0xFF)

    def _lend(self, tensor: Tensor) -> Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        at = (self.steps - 1) % self._slots
        if at == len(self._ring):
            self._ring.append(torch.empty(0, dtype=torch.uint8))
        slot = self._ring[at]
        slot.fill_(0xFF)
        if slot.numel() < nbytes:
            slot = self._ring[at] = torch.empty(nbytes, dtype=torch.uint8)
        lent = slot[:nbytes].view(tensor.dtype).view(tensor.shape) if nbytes else torch.empty_like(tensor)
        return lent.copy_(tensor)


def _lies_in(tensor: Any, ring: list[Tensor]) -> bool:
    """Whether ``tensor`` (or storage) is memory of one of the slots."""
    address = tensor.data_ptr()
    return any(slot.data_ptr() <= address < slot.data_ptr() + slot.numel() for slot in ring)
