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
    others = [name for name in names if name not in set(wrapped)] or [
        each for each in wrapped if _leading(each) != prefix
    ]
    raise MappingError(
        f"{len(wrapped)} of {len(names)} names carry the prefix of a wrapper ({wrapped[0]!r}), others do not or another one "
        f"({others[0]!r}); such a checkpoint was put together of two, rename one of them with a mapper"
    )


def _leading(name: str) -> str:
    end = 0
    while name.startswith(_WRAPPERS, end):
        end = name.index(".", end) + 1
    return name[:end]
