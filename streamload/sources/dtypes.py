"""Codes of dtypes and torch's dtypes."""

from __future__ import annotations

import torch

from streamload.checkpoint.dtypes import BITS, FROM_TORCH
from streamload.errors import LoadError

#: Of the dtypes that this torch has.
CODES: dict[torch.dtype, str] = {
    getattr(torch, name): code for name, code in FROM_TORCH.items() if hasattr(torch, name)
}
_DTYPES: dict[str, torch.dtype] = {code: dtype for dtype, code in CODES.items()}


def dtype_code(dtype: torch.dtype | str) -> str:
    """The code for a torch dtype, its name (``"bfloat16"``, ``"torch.bfloat16"``), or a code (``"BF16"``)."""
    if isinstance(dtype, torch.dtype):
        if dtype in CODES:
            return CODES[dtype]
    elif not isinstance(dtype, str):
        pass
    elif dtype in BITS:
        return dtype
    elif (name := dtype.removeprefix("torch.")) in FROM_TORCH:
        return FROM_TORCH[name]
    raise LoadError(f"dtype {dtype!r} is not known; expected one of {', '.join(BITS)} or torch's names for them")


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype for ``code``. Raises LoadError when this torch has none."""
    if code not in _DTYPES:
        raise LoadError(f"torch {torch.__version__} has no dtype for {code}")
    return _DTYPES[code]
