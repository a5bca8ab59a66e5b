"""Checkpoints of some GiB, written in seconds, whose every byte can be checked again."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import torch

BLOCK = 1 << 20  # elements


@cache
def block() -> torch.Tensor:
    """The values that repeat through such a checkpoint, bf16 [BLOCK]; no NaN among them."""
    return torch.randn(BLOCK, generator=torch.Generator().manual_seed(7)).bfloat16()


def write_big(path: Path | str, shapes: dict[str, tuple[int, ...]]) -> str:
    """Write bf16 tensors of ``shapes``; the data as a whole is ``block()`` over and over. Returns ``path``."""
    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # as the library writes it
    data = block().view(torch.uint8).numpy().tobytes()
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        while end:
            end -= file.write(data[:end])
        file.flush()
        os.fsync(file.fileno())
    return os.fspath(path)


def wrong_tensors(tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Names whose values are not what ``write_big`` wrote, converted to their dtype. Takes little memory."""
    pattern, wrong, at = block(), [], 0
    for name, shape in shapes.items():
        flat, done = tensors[name].detach().reshape(-1), 0
        assert tensors[name].shape == torch.Size(shape)
        while done < flat.numel():
            start = (at + done) % BLOCK
            size = min(BLOCK - start, flat.numel() - done, 1 << 16)
            if not torch.equal(flat[done : done + size], pattern[start : start + size].to(flat.dtype)):
                wrong.append(name)
                break
            done += size
        at += flat.numel()
    return wrong
