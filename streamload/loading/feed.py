"""Feed a module's own ``load_weights``, which pulls, from a stream that pushes: interleaved modules get one call each."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from streamload.errors import LoadError
from streamload.interrupts import postponed
from streamload.sources.lent import Lender


class _Abandoned(BaseException):
    """Raised where a module waits for its next tensor, when the load has broken off."""


class Feed:
    """Runs ``consume(iterator)`` in a thread of its own and hands it one tensor at a time; never do both threads run.

    ``title`` says whose ``load_weights`` it is. Grad mode, the default device and context variables are those of the thread that
    made the feed. ``lends``: a tensor is the consumer's only until it asks for the next, which can come much later than others
    for other modules; see ``Lender``.
    """

    def __init__(self, title: str, consume: Callable[[Iterator[tuple[str, Tensor]]], Any], *, lends: bool) -> None:
        self.title = title
        self.result: Any = None
        self.ended = False
        """Whether it has returned, or raised."""
        self._consume, self._lends = consume, lends
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()
        self._items: SimpleQueue[tuple[str, Tensor] | BaseException | None] = SimpleQueue()
        self._states: SimpleQueue[tuple[bool, BaseException | None]] = SimpleQueue()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="streamload-feed", daemon=True)

    def start(self) -> None:
        """Let it run until it asks for its first tensor."""
        with postponed():
            self._thread.start()
        self._await()

    def give(self, name: str, tensor: Tensor) -> None:
        """Hand over a tensor, and wait until the next one is asked for. Raises what ``load_weights`` raises."""
        self._items.put((name, tensor))
        del tensor
        self._await()

    def finish(self) -> None:
        """No more tensors come; wait until it returns."""
        if not self.ended:
            self._items.put(None)
            self._await()
            if not self.ended:
                raise LoadError(f"{self.title} asked for another tensor after its stream had ended")
        self._thread.join()

    def abandon(self) -> None:
        """Let it end without the rest."""
        if not self.ended and self._thread.ident is not None:
            self._items.put(_Abandoned())
            with postponed():
                self._thread.join()
        self.ended = True

    def _await(self) -> None:
        self.ended, failure = self._states.get()
        if failure is not None:
            raise failure

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            with ExitStack() as stack:
                if self._device.type != "cpu":
                    stack.enter_context(self._device)
                stack.enter_context(torch.inference_mode(self._inference))
                stack.enter_context(torch.set_grad_enabled(self._grad))
                self.result = self._consume(self._tensors())
        except _Abandoned:
            pass
        except BaseException as error:
            failure = error
        self._states.put((True, failure))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        lender = Lender(self.title) if self._lends else None
        while True:
            if lender is not None:
                lender.take_back()
            self._states.put((False, None))
            if isinstance(item := self._items.get(), BaseException):
                raise item
            if item is None:
                return
            name, tensor = item
            del item  # the source looks whether anybody holds the tensor
            handed = [tensor if lender is None else lender.lend(name, tensor)]
            del tensor
            yield name, handed.pop()
