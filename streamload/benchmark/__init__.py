"""Ways of loading side by side, for ``streamload bench`` and for bench/."""

from streamload.benchmark.compare import WAYS, Measured, compare

__all__ = ["WAYS", "Measured", "compare"]
