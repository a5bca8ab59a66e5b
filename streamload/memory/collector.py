"""Python's cycle collector, kept out of the way.

A model of many modules is hundreds of thousands of objects, and a catalog adds as many. The collector walks all of them
several times while the catalog is made, which took longer than all the rest of loading 20,000 tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def quiet_collector() -> Iterator[Callable[[], None]]:
    """Look for no garbage cycles inside; for short work that makes none.

    Gives a function that ends the silence early: from then on the collector works again but spares all objects that
    exist by then, until the block is left. (It cannot spare them where the program has frozen objects of its own.)
    """
    was_on = gc.isenabled()
    frozen = False

    def spare() -> None:
        nonlocal frozen
        if gc.get_freeze_count() == 0:
            frozen = True
            gc.freeze()
        if was_on:
            gc.enable()

    try:
        gc.disable()
        yield spare
    finally:
        if frozen:
            gc.unfreeze()
        if was_on:
            gc.enable()
