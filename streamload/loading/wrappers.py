"""Prefixes that wrappers of a model leave in the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection

from streamload.errors import MappingError

#: DataParallel and DistributedDataParallel; torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")


def wrapper_prefix(names: Collection[str], lands: Callable[[str], bool]) -> str:
    """The prefix, such as ``module._orig_mod.``, that every name carries and that is a wrapper's; empty when there is none.

    ``lands`` says whether a name finds its place as it is; such a name is never taken for a wrapped one. Raises MappingError
    when only some names are wrapped.
    """
    wrapped = [name for name in names if name.startswith(_WRAPPERS) and not lands(name)]
    if not wrapped:
        return ""
    prefix = _leading(wrapped[0])
    if len(wrapped) == len(names) and all(_leading(name) == prefix for name in wrapped):
        return prefix
    if not any(lands(name.removeprefix(_leading(name))) for name in wrapped):
        return ""  # they are unexpected anyway, and told so
    known = set(wrapped)
    others = [name for name in names if name not in known] or [each for each in wrapped if _leading(each) != prefix]
    raise MappingError(
        f"{len(wrapped)} of {len(names)} names carry the prefix of a wrapper ({wrapped[0]!r}), others do not or another one "
        f"({others[0]!r}); such a checkpoint was put together of two, rename one of them with a mapper"
    )


def taken_off(prefix: str) -> list[str]:
    """What to note about ``prefix``, if there is one."""
    return [f"{prefix!r} taken off every name: it is the prefix of a wrapper, not of the module"] if prefix else []


class Unwrapper:
    """Takes a wrapper's prefix off the names of a stream. The first name that finds its place, with or without, decides."""

    def __init__(self, lands: Callable[[str], bool]) -> None:
        self._lands = lands
        self._decided_by = ""
        self.prefix = ""

    def __call__(self, name: str) -> str:
        """``name`` without the prefix. Raises MappingError when only some names carry it."""
        leading = _leading(name)
        if self._decided_by and leading == self.prefix:
            return name[len(leading) :]
        at_home = self._lands(name)
        if self._decided_by and (self.prefix or (leading and not at_home and self._lands(name[len(leading) :]))):
            raise MappingError(
                f"of {self._decided_by!r} and {name!r} only one carries the prefix of a wrapper; the stream was put together of "
                "two, rename one of them with a mapper"
            )
        if not self._decided_by and (at_home or (leading and self._lands(name[len(leading) :]))):
            self._decided_by, self.prefix = name, "" if at_home else leading
        return name.removeprefix(self.prefix)


def _leading(name: str) -> str:
    end = 0
    while name.startswith(_WRAPPERS, end):
        end = name.index(".", end) + 1
    return name[:end]
