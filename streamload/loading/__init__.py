"""From names and headers to a loaded module: placements, plan, execution, ledger, report."""

from streamload.loading.buffers import Spoiled, audit_buffers, restore_buffers
from streamload.loading.entry import load, plan
from streamload.loading.mark import partial_load
from streamload.loading.placement import Placement
from streamload.loading.planning import Forecast, LoadPlan
from streamload.loading.report import LoadReport
from streamload.loading.run import Progress
from streamload.loading.skeleton import skeleton

__all__ = [
    "Forecast",
    "LoadPlan",
    "LoadReport",
    "Placement",
    "Progress",
    "Spoiled",
    "audit_buffers",
    "load",
    "partial_load",
    "plan",
    "restore_buffers",
    "skeleton",
]
