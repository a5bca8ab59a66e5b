"""Embedder: a folder of an embedding model, loaded through streamload."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamload.checkpoint import Checkpoint
from streamload.embedder.folder import Recipe, read_recipe
from streamload.errors import LoadError
from streamload.integrations.transformers import build_model, folder_of, load_tokenizer
from streamload.loading import LoadReport, Progress, load
from streamload.pooling import mean_pool, normalise
from streamload.sources.dtypes import dtype_code, torch_dtype


class Embedder:
    """Turns texts into vectors. Made by ``Embedder.from_pretrained``."""

    def __init__(self, model: nn.Module, tokenizer: Any, recipe: Recipe, report: LoadReport) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.report = report
        """What loading the model took."""
        positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
        self.max_tokens: int = recipe.max_tokens or min(positions, tokenizer.model_max_length)
        """Texts are cut at this many tokens."""

    @classmethod
    def from_pretrained(
        cls,
        location: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        memory_limit: int | str = "auto",
        backend: str = "auto",
        revision: str | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Embedder:
        """Load the embedding model at ``location``: a sentence-transformers folder or a plain encoder's.

        ``location`` may also be the name of a model in the local Hugging Face cache, of which ``revision`` picks a branch or
        commit. ``dtype`` is that of the weights, by default as stored. The other arguments are those of ``streamload.load``.
        Raises CheckpointError and LoadError, the latter also for modules that streamload does not know.
        """
        folder = os.fspath(location)
        if not os.path.exists(folder):
            folder = folder_of(Checkpoint.open(folder, revision=revision))
        if not os.path.isdir(folder):
            raise LoadError(f"{folder}: expected the folder of an embedding model, found a file")
        recipe = read_recipe(folder)
        checkpoint = Checkpoint.open(recipe.body)
        own = torch_dtype(dtype_code(dtype)) if dtype is not None else None
        model = build_model(checkpoint, base=True, dtype=own)
        report = load(model, checkpoint, device=device, memory_limit=memory_limit, backend=backend, progress=progress)
        if device is not None:
            model.to(device)  # buffers that the model computes itself
        return cls(model, load_tokenizer(recipe.body), recipe, report)

    @torch.inference_mode()
    def encode(self, texts: str | Sequence[str], *, batch_size: int = 32) -> Tensor:
        """The vectors of ``texts``, fp32 [n, dim] on the CPU, in the order of the texts.

        Texts are cut at ``max_tokens``. ``batch_size`` texts are computed at a time.
        """
        if batch_size < 1:
            raise LoadError(f"batch_size={batch_size}: expected at least one")
        wanted = [texts] if isinstance(texts, str) else list(texts)
        batches = [self._encode(wanted[at : at + batch_size]) for at in range(0, len(wanted), batch_size)]
        return torch.cat(batches) if batches else self._encode([""])[:0]

    def _encode(self, texts: list[str]) -> Tensor:
        device = next(self.model.parameters()).device
        inputs = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(device)
        hidden = self.model(**inputs).last_hidden_state
        vectors = mean_pool(hidden, inputs["attention_mask"])
        return (normalise(vectors) if self.recipe.normalise else vectors).cpu()
