"""Pooling: one vector for each text from the hidden states of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over the real tokens, accumulated in fp32 (as sentence-transformers' ``mean`` mode).

    ``hidden`` is [texts, tokens, dim], ``mask`` [texts, tokens] with 1 for real tokens. Returns fp32 [texts, dim].
    """
    weight = mask.unsqueeze(-1).float()
    return (hidden.float() * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


def normalise(vectors: Tensor) -> Tensor:
    """``vectors`` [texts, dim] scaled to length one."""
    return torch.nn.functional.normalize(vectors, p=2, dim=-1)
