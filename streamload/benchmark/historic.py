"""A double of the prefix probe as it used to be in the field, to measure what the difference is worth."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor


def historic_load(model: Any, weights: Iterable[tuple[str, Tensor]], prefix: str = "model.") -> Any:
    """Find the prefix of ``weights`` and let ``model.load_weights`` load them: the faults are on purpose.

    It does not ask the model's mapper, so that a name which only the mapper brings home is no hit; it clones every tensor
    that it looks at, the hit included, also those that the mapper drops; it goes on until a hit, to the end if there is none;
    and what it has cloned lives until the load has ended.
    """
    names = {name for name, _ in model.named_parameters()}
    items, looked_at, found = iter(weights), [], ""
    for name, tensor in items:
        looked_at.append((name, tensor.clone()))
        del tensor
        if name in names:
            break
        if prefix + name in names:
            found = prefix
            break
    return model.load_weights((found + name, tensor) for name, tensor in chain(looked_at, items))
