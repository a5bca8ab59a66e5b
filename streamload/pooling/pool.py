"""Pooling: one vector for each text from the hidden states of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["last", "mean", "cls", "max"]


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over the real tokens, accumulated in fp32 (as sentence-transformers' ``mean`` mode).

    ``hidden`` is [texts, tokens, dim], ``mask`` [texts, tokens] with 1 for real tokens. Returns fp32 [texts, dim].
    """
    weight = mask.unsqueeze(-1).float()
    return (hidden.float() * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


def last_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The last real token, on whichever side the padding is. Shapes as of ``mean_pool``; zero for a text without tokens."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask.bool() * positions).argmax(1)
    return _pick(hidden, last) * mask.bool().any(1, keepdim=True)


def cls_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The first real token, on whichever side the padding is. Shapes as of ``mean_pool``."""
    return _pick(hidden, mask.bool().float().argmax(1))


def max_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The largest value of every dimension over the real tokens. Shapes as of ``mean_pool``."""
    return hidden.float().masked_fill(~mask.bool().unsqueeze(-1), -torch.inf).amax(1)


def _pick(hidden: Tensor, token: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), token].float()


POOLING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": last_pool,
    "mean": mean_pool,
    "cls": cls_pool,
    "max": max_pool,
}


def normalise(vectors: Tensor) -> Tensor:
    """``vectors`` [texts, dim] scaled to length one."""
    return torch.nn.functional.normalize(vectors, p=2, dim=-1)
