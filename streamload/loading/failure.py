"""What a load that broke off says and lets go."""

from __future__ import annotations

import traceback
from contextlib import suppress

from streamload.errors import SourceError
from streamload.loading.ledger import Ledger


def where(error: BaseException, ledger: Ledger) -> str:
    """At which tensor, of which file, after how much."""
    placements = ledger.placements
    amount = f"after {ledger.bytes_written:,} of {ledger.bytes_wanted:,} bytes"
    number = ledger.last
    if isinstance(error, SourceError) and error.offset is not None:
        at = error.offset
        touched = (
            number
            for number, placement in enumerate(placements)
            if placement.spec.file == error.path and placement.spec.offset + placement.spec.span > at
        )
        number = next(touched, number)
    if not placements:
        return amount
    spec = placements[number].spec
    return f"at tensor {spec.name!r} ({number + 1} of {len(placements)}) of {spec.file}, {amount}"


def clear_frames(error: BaseException) -> None:
    """Clear the finished frames of streamload and torch that ``error`` and its causes hold."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        chain += [link.__cause__, link.__context__]
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] in ("streamload", "torch"):
                with suppress(RuntimeError):  # it is still running: ours, which has let go of everything itself
                    frame.clear()
