"""The budget: host bytes that a load may hold beyond the parameters themselves."""

from __future__ import annotations

import re

from streamload.errors import BudgetError

MiB = 1024 * 1024

#: "auto" never takes more than this.
AUTO_MAX = 64 * MiB

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def resolve_budget(memory_limit: int | str, available: int) -> int:
    """The budget in bytes.

    ``memory_limit`` is a number of bytes, a size such as ``"32MiB"``, a share such as ``"10%"`` of the ``available``
    bytes, or ``"auto"``: the smaller of 64 MiB and a quarter of what is available. Raises BudgetError for anything else.
    """
    if isinstance(memory_limit, int) and not isinstance(memory_limit, bool):
        if memory_limit <= 0:
            raise BudgetError(f"memory_limit={memory_limit}: expected a positive number of bytes")
        return memory_limit
    if memory_limit == "auto":
        return min(AUTO_MAX, available // 4)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", str(memory_limit))
    if match and len(match[1]) > 30:
        match = None  # beyond any memory, and beyond floats
    if match and match[2] == "%" and 0 < float(match[1]) <= 100:
        return int(available * float(match[1]) / 100)
    if match and match[2].upper() in _UNITS and (nbytes := int(float(match[1]) * _UNITS[match[2].upper()])):
        return nbytes
    raise BudgetError(
        f'memory_limit={memory_limit!r}: expected "auto", bytes, a size such as "32MiB", or a share such as "10%"'
    )
