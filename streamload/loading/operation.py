"""Stored tensors whose values have to be computed, not only moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.errors import LoadError

if TYPE_CHECKING:
    from streamload.loading.targets import Targets


class Operation(NamedTuple):
    """Stored tensors that go through a computation, which needs all of them in memory at once."""

    title: str
    sources: Mapping[str, TensorSpec]
    targets: Mapping[str, tuple[int, ...]]
    """The parameters that it fills, and the shapes that it makes."""
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """From the stored tensors by name to the values by parameter."""


def compute(operation: Operation, tensors: dict[str, Tensor], targets: Targets) -> None:
    """Run ``operation`` on its stored tensors and put what it makes into its targets, which have memory."""
    made = operation.run(tensors)
    if (shapes := {name: tuple(value.shape) for name, value in made.items()}) != dict(operation.targets):
        raise LoadError(f"{operation.title}: expected to make {dict(operation.targets)}, but it made {shapes}")
    for name, value in made.items():
        target = targets.tensors[targets.first(name).name].detach()
        with torch.inference_mode(target.is_inference()):
            target.copy_(value)
