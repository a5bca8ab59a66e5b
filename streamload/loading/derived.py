"""A parameter that is computed from a few rows of a stored tensor, as a score head is from those of a language model's head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamload.checkpoint import TensorSpec
from streamload.errors import LoadError
from streamload.loading.operation import Operation


@dataclass
class Derivation:
    """How ``target`` is made when the checkpoint does not store it. Only the rows that it needs are read, or kept."""

    target: str
    """Name of the parameter in its module, such as ``"score.weight"``."""
    sources: Sequence[str]
    """Names of the parameters whose stored tensor has the rows; the first that is stored counts."""
    rows: Sequence[int]
    make: Callable[[list[Tensor]], Tensor]
    """From the rows, fp32 [hidden] each, to the value of the target."""
    setting: str
    """What asks for it, for messages."""
    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    """Rows of those that have passed in a stream."""

    def keep(self, source: str, tensor: Tensor) -> int:
        """``tensor``, which a stream lends, is the stored one of ``source``: copy its rows. Returns their bytes."""
        self._check(source, tuple(tensor.shape))
        self.kept[source] = [tensor[row].detach().to(torch.float32, copy=True) for row in self.rows]
        return sum(row.nbytes for row in self.kept[source])

    def value(self) -> Tensor | None:
        """The value, from the rows that were kept; ``None`` when no source has passed."""
        source = next((each for each in self.sources if each in self.kept), None)
        return None if source is None else self.make(self.kept[source])

    def operation(self, source: str, spec: TensorSpec, target: str, shape: tuple[int, ...]) -> Operation:
        """The computation from the stored tensor ``spec``, which is that of ``source``."""
        self._check(source, spec.shape)
        row_bytes = spec.nbytes // spec.shape[0]
        sources = {
            f"{spec.name}[{row}]": spec._replace(
                shape=(1, *spec.shape[1:]), offset=spec.offset + row * row_bytes, nbytes=row_bytes
            )
            for row in dict.fromkeys(self.rows)
        }
        if spec.strides is not None:
            raise LoadError(f"{spec.name}: stored as a view of another layout, so {target} cannot be made of its rows")

        def run(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {target: self.make([tensors[f"{spec.name}[{row}]"][0].to(torch.float32) for row in self.rows])}

        return Operation(f"{target} ({self.setting}) from rows of {spec.name}", sources, {target: shape}, run)

    def _check(self, source: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or any(not 0 <= row < shape[0] for row in self.rows):
            raise LoadError(
                f"{self.target} ({self.setting}) is made of rows {', '.join(map(str, self.rows))} of {source}, which has shape "
                f"{list(shape)}"
            )

    def nothing(self) -> str:
        """What to say when there is no source."""
        return (
            f"not stored, and {self.setting} makes it of rows of {' or '.join(self.sources)}, none of which is stored"
        )
