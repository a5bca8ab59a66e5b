"""streamload: a memory-safe streaming weight loader for PyTorch.

The names below are imported when they are first used, so that ``import streamload`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamload.checkpoint import Checkpoint, TensorSpec
    from streamload.embedder import Embedder
    from streamload.errors import (
        BorrowError,
        BudgetError,
        CheckpointError,
        LoadError,
        MappingError,
        SourceError,
        StreamloadError,
    )
    from streamload.loading import (
        LoadPlan,
        LoadReport,
        Progress,
        audit_buffers,
        load,
        partial_load,
        plan,
        restore_buffers,
        skeleton,
    )
    from streamload.mapping import Mapped, WeightsMapper
    from streamload.memory import Limits, Meter
    from streamload.memory.clones import count_clones
    from streamload.pooling import as_embedding_model, as_seq_cls_model
    from streamload.sources.guard import guard
    from streamload.sources.lora import merge_lora
    from streamload.sources.source import Source
    from streamload.sources.stream import stream

_ROOMS = {
    "checkpoint": ("Checkpoint", "TensorSpec"),
    "embedder": ("Embedder",),
    "errors": (
        "BorrowError",
        "BudgetError",
        "CheckpointError",
        "LoadError",
        "MappingError",
        "SourceError",
        "StreamloadError",
    ),
    "loading": (
        "LoadPlan",
        "LoadReport",
        "Progress",
        "audit_buffers",
        "load",
        "partial_load",
        "plan",
        "restore_buffers",
        "skeleton",
    ),
    "mapping": ("Mapped", "WeightsMapper"),
    "memory": ("Limits", "Meter"),
    "memory.clones": ("count_clones",),
    "pooling": ("as_embedding_model", "as_seq_cls_model"),
    "sources.guard": ("guard",),
    "sources.lora": ("merge_lora",),
    "sources.source": ("Source",),
    "sources.stream": ("stream",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "BorrowError",
    "BudgetError",
    "Checkpoint",
    "CheckpointError",
    "Embedder",
    "Limits",
    "LoadError",
    "LoadPlan",
    "LoadReport",
    "Mapped",
    "MappingError",
    "Meter",
    "Progress",
    "Source",
    "SourceError",
    "StreamloadError",
    "TensorSpec",
    "WeightsMapper",
    "as_embedding_model",
    "as_seq_cls_model",
    "audit_buffers",
    "count_clones",
    "guard",
    "load",
    "merge_lora",
    "partial_load",
    "plan",
    "restore_buffers",
    "skeleton",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'streamload' has no attribute {name!r}")
    value = getattr(import_module(f"streamload.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
