"""Stored tensors whose values have to be computed, not only moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from streamload.checkpoint import TensorSpec


class Operation(NamedTuple):
    """Stored tensors that go through a computation, which needs all of them in memory at once."""

    title: str
    sources: Mapping[str, TensorSpec]
    targets: Mapping[str, tuple[int, ...]]
    """The parameters that it fills, and the shapes that it makes."""
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """From the stored tensors by name to the values by parameter."""
