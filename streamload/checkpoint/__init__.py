"""What is stored: find the files, read their headers, check them. No torch in this room."""

from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.spec import TensorSpec

__all__ = ["Checkpoint", "TensorSpec"]
