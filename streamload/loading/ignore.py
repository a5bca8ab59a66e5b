"""The names that may be left over or missing."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from streamload.errors import LoadError
from streamload.loading.keys import summarise


class Ignore:
    """Exact names and globs, with a count of hits for each."""

    def __init__(self, title: str, patterns: Iterable[str]) -> None:
        if isinstance(patterns, (str, bytes)) or not isinstance(patterns, Iterable):
            found = "a single string" if isinstance(patterns, str) else type(patterns).__name__
            raise LoadError(f"{title}={patterns!r:.80}: expected a list of names or globs, found {found}")
        patterns = list(patterns)
        if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
            raise LoadError(f"{title}: expected names or globs, found {wrong[0]!r:.80}")
        self._title = title
        self._exact = dict.fromkeys(patterns, 0)
        self._globs = [pattern for pattern in self._exact if any(sign in pattern for sign in "*?[")]

    def refuse_exact(self, known: Iterable[str]) -> None:
        wrong = [name for name in known if name in self._exact]
        if wrong:
            raise LoadError(
                f"{self._title} names {summarise(wrong)}, which the module has; leave it in, or change the checkpoint's name "
                "with a mapper"
            )

    def match(self, name: str) -> str | None:
        if not self._exact:
            return None
        hit = name if name in self._exact else next((glob for glob in self._globs if fnmatchcase(name, glob)), None)
        if hit is None:
            return None
        self._exact[hit] += 1
        return f"{self._title} {hit!r}"

    def unused(self) -> list[str]:
        return [f"{self._title} {pattern!r} matched nothing" for pattern, hits in self._exact.items() if not hits]
