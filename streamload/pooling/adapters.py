"""A language model's class becomes an embedding model's, or a classifier's: heads left out, names of any spelling taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, get_args

from torch import nn

from streamload.errors import LoadError
from streamload.loading.targets import GENERIC, LOADER
from streamload.pooling.pool import POOLING, Pooling
from streamload.pooling.pooled import Classifier, EmbeddingModel, Method, Pooled


def as_embedding_model(
    cls: type[nn.Module], *, pooling: Pooling = "last", normalize: bool = True, heads: Iterable[str] | None = None
) -> Any:
    """A subclass of ``cls``, a causal or base language model, that gives one vector a text.

    ``model(input_ids, attention_mask=...)`` returns fp32 [texts, dim]: the ``pooling`` ("last" or "cls": the last or first real
    token, "mean", "max") of the base model's last hidden states [texts, tokens, dim] over the tokens whose mask is 1,
    ``normalize``: of length one. ``heads``: dotted names of modules to leave out; by default all beside the base model of a
    transformers class, and those called like heads (``lm_head``, ``score``, ...) of others. Their weights are neither read nor
    kept; ``report.dropped`` names them.

    ``streamload.load(model, weights)`` and ``model.load_weights(weights)`` take checkpoints whose names have the base model's
    prefix (``base_model_prefix`` of the class, else ``model``) or lack it. A ``load_weights`` of ``cls`` gets the original
    names, with the prefix that it expects; see ``streamload.pooling.probe``.
    """
    if pooling not in POOLING:
        raise LoadError(f"pooling={pooling!r}: expected one of {', '.join(POOLING)}")
    key: Any = _original(cls)
    return _embedding_class(key, pooling, bool(normalize), None if heads is None else tuple(heads))


def as_seq_cls_model(
    cls: type[nn.Module],
    *,
    num_labels: int,
    pooling: Pooling = "last",
    method: Method | None = None,
    classifier_from_token: Sequence[int] = (),
    bias: bool = False,
    heads: Iterable[str] | None = None,
) -> Any:
    """A subclass of ``cls``, a causal or base language model, that gives ``num_labels`` scores a text.

    ``model(input_ids, attention_mask=...)`` returns fp32 logits [texts, num_labels]: ``score``, a linear layer kept in fp32, of
    the pooled hidden state. ``score.weight`` [num_labels, hidden] is what the checkpoint ships under that name; where it ships
    none, ``method`` makes it of rows of ``lm_head.weight``, or of the embedding that it is tied to, of which only those rows are
    read: ``"from_2_way_softmax"`` is the row of the second token of ``classifier_from_token`` minus that of the first (one
    label, whose sigmoid is the softmax of the second against the first), ``"no_post_processing"`` the rows themselves, one a
    label. ``bias``: whether ``score`` has one. The other arguments are those of ``as_embedding_model``.
    """
    if pooling not in POOLING:
        raise LoadError(f"pooling={pooling!r}: expected one of {', '.join(POOLING)}")
    tokens = tuple(classifier_from_token)
    _check_tokens(num_labels, method, tokens)
    key: Any = _original(cls)
    return _classifier_class(key, pooling, num_labels, method, tokens, bias, None if heads is None else tuple(heads))


def _check_tokens(num_labels: int, method: str | None, tokens: tuple[int, ...]) -> None:
    if num_labels < 1:
        raise LoadError(f"num_labels={num_labels}: expected at least one")
    if method is None:
        if tokens:
            raise LoadError(f"classifier_from_token={list(tokens)}: needs a method: {' or '.join(get_args(Method))}")
        return
    if method not in get_args(Method):
        raise LoadError(f"method={method!r}: expected one of {', '.join(get_args(Method))}")
    if wrong := [token for token in tokens if not isinstance(token, int) or isinstance(token, bool) or token < 0]:
        raise LoadError(
            f"classifier_from_token: expected ids of tokens, found {wrong[0]!r}; ask the tokenizer for its id"
        )
    if method == "from_2_way_softmax" and (len(tokens) != 2 or num_labels != 1):
        raise LoadError(
            f"method='from_2_way_softmax': expected two tokens and num_labels=1, found {len(tokens)} and {num_labels}"
        )
    if method == "no_post_processing" and len(tokens) != num_labels:
        raise LoadError(
            f"method='no_post_processing': expected a token for each of {num_labels} labels, found {len(tokens)}"
        )


def _original(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that was adapted, if ``cls`` is one that was made here."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise LoadError(f"expected a class of modules, found {cls!r}")
    return cls._made_of if issubclass(cls, Pooled) else cls


@cache
def _embedding_class(
    cls: type[nn.Module], pooling: Pooling, normalize: bool, heads: tuple[str, ...] | None
) -> type[nn.Module]:
    recipe = (as_embedding_model, cls, {"pooling": pooling, "normalize": normalize, "heads": heads})
    return _made(cls, recipe, EmbeddingModel, "ForEmbedding", _pooling=pooling, _normalize=normalize, _heads=heads)


@cache
def _classifier_class(
    cls: type[nn.Module],
    pooling: Pooling,
    num_labels: int,
    method: Method | None,
    tokens: tuple[int, ...],
    bias: bool,
    heads: tuple[str, ...] | None,
) -> type[nn.Module]:
    own = {"_num_labels": num_labels, "_method": method, "_tokens": tokens, "_bias": bias}
    options = {"num_labels": num_labels, "pooling": pooling, "method": method, "classifier_from_token": tokens}
    recipe = (as_seq_cls_model, cls, options | {"bias": bias, "heads": heads})
    return _made(cls, recipe, Classifier, "ForScoring", _pooling=pooling, _heads=heads, **own)


def _made(
    cls: type[nn.Module], recipe: tuple[Any, ...], kind: type[Pooled], ending: str, **own: Any
) -> type[nn.Module]:
    own_loader = hasattr(cls, LOADER)
    body = own | {
        "_recipe": recipe,
        "_made_of": cls,
        "_own_loader": own_loader,
        GENERIC: not own_loader,
        "__module__": cls.__module__,
    }
    return type(f"{cls.__name__}{ending}", (kind, cls), body)
