"""Text in, vectors out."""

from streamload.embedder.embedder import Embedder

__all__ = ["Embedder"]
