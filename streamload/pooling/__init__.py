"""From hidden states to one vector a text. No transformers in this room."""

from streamload.pooling.pool import mean_pool, normalise

__all__ = ["mean_pool", "normalise"]
