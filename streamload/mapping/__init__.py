"""From a checkpoint's names to a module's: rules that cannot cascade, explained and checked. No torch in this room."""

from streamload.mapping.explain import Explanation
from streamload.mapping.lint import Finding
from streamload.mapping.mapper import WeightsMapper
from streamload.mapping.rules import Expert, Mapped, ShardId, Step

__all__ = ["Expert", "Explanation", "Finding", "Mapped", "ShardId", "Step", "WeightsMapper"]
