"""Limits of the host, the budget, and meters. No torch in this room."""

from streamload.memory.budget import resolve_budget
from streamload.memory.limits import Limit, Limits
from streamload.memory.meter import Meter, Resident, resident

__all__ = ["Limit", "Limits", "Meter", "Resident", "resident", "resolve_budget"]
