"""Count clones of tensors, wherever in the process they are made."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()
_counters: list[count_clones] = []
_originals: list[tuple[Any, str, Any, bool]] = []


class count_clones:  # noqa: N801  it is used like a function
    """Context manager that counts the tensors cloned inside it: ``with count_clones() as clones: ...; clones.count``.

    Counts ``tensor.clone()``, ``torch.clone``, ``tensor.__deepcopy__`` (``copy.deepcopy``) and clones of storages, by any thread;
    not what torch copies inside other operations, such as ``to`` or ``contiguous``. Counters may be nested.
    """

    def __init__(self, of: Callable[[Any], bool] | None = None) -> None:
        self._of = of
        """Which tensors' clones to count; ``None`` for all."""
        self.count = 0
        """Clones made."""
        self.nbytes = 0
        """Their bytes."""

    def __enter__(self) -> count_clones:
        with _lock:
            if not _counters:
                _patch()
            _counters.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            _counters.remove(self)
            if not _counters:
                _restore()

    def saw(self, original: Any, nbytes: int) -> None:
        """``original`` has been cloned."""
        if self._of is None or self._of(original):
            self.count += 1
            self.nbytes += nbytes

    def __repr__(self) -> str:
        return f"count_clones(count={self.count}, nbytes={self.nbytes:,})"


def _patch() -> None:
    import torch

    for owner, name in ((torch.Tensor, "clone"), (torch, "clone"), (torch.UntypedStorage, "clone")):
        original = getattr(owner, name)
        _originals.append((owner, name, original, name in vars(owner)))
        setattr(owner, name, _counting(original))


def _restore() -> None:
    while _originals:
        owner, name, original, own = _originals.pop()
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)  # it was inherited


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clone(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        nbytes = made.nbytes() if callable(made.nbytes) else made.nbytes
        with _lock:
            for counter in _counters:
                counter.saw(args[0] if args else kwargs.get("input"), nbytes)
        return made

    return clone
