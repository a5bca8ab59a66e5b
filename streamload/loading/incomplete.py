"""A fused parameter of which parts are missing."""

from __future__ import annotations

from typing import NamedTuple


class Incomplete(NamedTuple):
    """A fused parameter of which parts are missing."""

    name: str
    present: list[str]
    missing: list[str]
    wanted: list[str]
    """Names in the checkpoint that would fill the missing parts."""

    def __str__(self) -> str:
        there = f"part {', '.join(self.present)} present, " if self.present else ""
        return (
            f"{self.name}: {there}part {', '.join(self.missing)} missing; would be filled by {', '.join(self.wanted)}"
        )
