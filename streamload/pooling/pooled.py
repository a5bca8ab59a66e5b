"""What a model class becomes when it is made for pooling."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from streamload.errors import LoadError
from streamload.loading import load
from streamload.loading.adapting import ADAPTER, Adapter
from streamload.loading.derived import Derivation
from streamload.loading.handed import Handed
from streamload.loading.targets import RUNNING, module_targets
from streamload.pooling.forward import Forwarded
from streamload.pooling.heads import base_prefix, find_heads, leave_out
from streamload.pooling.pool import POOLING, Pooling, normalise

Method = Literal["from_2_way_softmax", "no_post_processing"]


class Pooled(nn.Module):
    """What both kinds have in common; stands before the original class among the bases."""

    _pooling: ClassVar[Pooling]
    _heads: ClassVar[tuple[str, ...] | None]
    _made_of: ClassVar[type[nn.Module]]
    _recipe: ClassVar[tuple[Any, ...]]
    """The function that made the class, the original class, and the options."""
    _own_loader: ClassVar[bool]
    """Whether the original class loads itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads = find_heads(self) if self._heads is None else list(self._heads)
        tied = leave_out(self, heads)
        base = base_prefix(self)
        # A base class has no head, but its checkpoint can.
        self.__dict__[ADAPTER] = Adapter(f"{base}.", base in self._modules, heads or ["lm_head"], tied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For ``pickle`` and ``copy``: the class is made again, since it cannot be found by its name."""
        return _made_again, self._recipe, self.__dict__

    def get_output_embeddings(self) -> None:
        """Asked by transformers: there are none."""
        return

    def own_parameters(self) -> Sequence[str]:
        """Names of parameters that the original class does not have."""
        return ()

    def pooled(self, *args: Any, **kwargs: Any) -> Tensor:
        """The pooled hidden states, fp32 [texts, dim]; the arguments are those of the base model."""
        base = self._modules.get(base_prefix(self))
        forward = base if base is not None else super().forward
        taken = inspect.signature(base.forward if base is not None else forward).bind_partial(*args, **kwargs).arguments
        made = forward(*args, **kwargs)
        hidden = getattr(made, "last_hidden_state", made[0] if isinstance(made, tuple) else made)
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            found = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise LoadError(
                f"{type(self).__name__}: expected hidden states [texts, tokens, dim] of the base model, found {found}"
            )
        mask = taken.get("attention_mask", taken.get("kwargs", {}).get("attention_mask"))
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return POOLING[self._pooling](hidden, mask)

    def load_weights(self, weights: Any) -> set[str]:
        """Load a stream of (name, tensor), whose names may have or lack the base model's prefix; see ``streamload.load``.

        Returns the names of what was loaded. Raises LoadError when something is missing or has no place.
        """
        if self._own_loader and id(self) in RUNNING.get():
            return self._through_own_loader(weights)
        within = Handed.current.get()
        # Inside another load the stream is one module's share of it, and that load sees what is missing.
        report = load(self, weights, ignore_missing=["*"] if within is not None else ())
        if within is not None:
            within.clones += report.clones
            within.clone_bytes += report.clone_bytes
        targets = module_targets(self, None)
        return {name for name in targets.known() if name not in report.dropped and name not in report.missing_keys}

    def _through_own_loader(self, weights: Any) -> set[str]:
        """Decide how names are spelled, from all of them or from the first tensors; then let the class load."""
        stream = Forwarded(self, weights)
        try:
            result = super().load_weights(stream)  # type: ignore[misc]
        except Exception as error:
            if stream.tried:
                error.add_note(f"streamload: {stream.tried}")
            raise
        return {*(result or ()), *stream.finish()}


def _made_again(function: Any, cls: type[nn.Module], options: dict[str, Any]) -> Any:
    made = function(cls, **options)
    return made.__new__(made)


class EmbeddingModel(Pooled):
    """Gives one vector a text."""

    _normalize: ClassVar[bool]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """One vector a text, fp32 [texts, dim]; the arguments are those of the base model."""
        vectors = self.pooled(*args, **kwargs)
        return normalise(vectors) if self._normalize else vectors


class Classifier(Pooled):
    """Gives scores."""

    _num_labels: ClassVar[int]
    _method: ClassVar[Method | None]
    _tokens: ClassVar[tuple[int, ...]]
    _bias: ClassVar[bool]
    score: nn.Linear

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        embedding, hidden = _input_embedding(self)
        self.score = nn.Linear(hidden, self._num_labels, bias=self._bias, dtype=torch.float32)
        adapter: Adapter = self.__dict__[ADAPTER]
        adapter.exact = self.own_parameters()
        if self._method is not None:
            sources = [f"{head}.weight" for head in adapter.heads]
            sources += [adapter.tied[source] for source in sources if source in adapter.tied]
            if not adapter.tied and getattr(_text_config(self), "tie_word_embeddings", False) and embedding:
                sources.append(embedding)  # a base class has no head that could tell
            make = _two_way if self._method == "from_2_way_softmax" else torch.stack
            adapter.derivations = [Derivation("score.weight", sources, self._tokens, make, f"method={self._method!r}")]

    def own_parameters(self) -> Sequence[str]:
        """Names of parameters that the original class does not have."""
        return ["score.weight", "score.bias"] if self._bias else ["score.weight"]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits, fp32 [texts, num_labels]; the arguments are those of the base model."""
        logits: Tensor = self.score(self.pooled(*args, **kwargs).to(self.score.weight.dtype))
        return logits.float()


def _two_way(rows: list[Tensor]) -> Tensor:
    return (rows[1] - rows[0]).unsqueeze(0)


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config


def _input_embedding(model: Any) -> tuple[str, int]:
    """The parameter of the input embedding, and the size of the hidden states."""
    own = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    found: list[tuple[str, Any]] = [
        (name, each)
        for name, each in model.named_modules()
        if each is own or (own is None and isinstance(each, nn.Embedding))
    ]
    hidden = getattr(_text_config(model), "hidden_size", found[0][1].embedding_dim if found else None)
    if not isinstance(hidden, int):
        raise LoadError(
            f"{type(model).__name__}: cannot tell the size of its hidden states; expected config.hidden_size"
        )
    return (f"{found[0][0]}.weight" if found else ""), hidden
