"""From hidden states to one vector a text, and from a language model to one that makes them. No transformers in this room."""

from streamload.pooling.adapters import as_embedding_model, as_seq_cls_model
from streamload.pooling.pool import mean_pool, normalise

__all__ = ["as_embedding_model", "as_seq_cls_model", "mean_pool", "normalise"]
