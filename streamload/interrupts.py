"""Ctrl-C at a moment when Python's own threading cannot take it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed() -> Iterator[None]:
    """Let SIGINT wait until the block is left; for what must be done as a whole and is done soon.

    An interrupt while a thread is being started or joined can leave ``threading``'s locks held, so that the thread
    never ends. Only the main thread gets interrupts, so elsewhere this does nothing.
    """
    ours = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if ours else None
    if not callable(handler):  # ignored, or set by other than Python
        yield
        return
    pressed: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(pressed[0], None)
