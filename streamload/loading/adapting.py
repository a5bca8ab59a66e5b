"""What a module says of itself when it was made of another by leaving heads out: how stored names are spelled in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from streamload.loading.derived import Derivation

#: Attribute of a module that holds its Adapter.
ADAPTER = "_streamload_adapter"


@dataclass
class Adapter:
    """How names of checkpoints relate to those of one module."""

    prefix: str
    """The base model's, such as ``"model."``: stored names may lack it, or have it where the module has not."""
    has_base: bool = False
    """Whether the module has a child of that name."""
    heads: Sequence[str] = ()
    """Dotted names of modules that were left out."""
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter of a head that was left out -> the one that it was tied to."""
    exact: Sequence[str] = ()
    """Parameters that keep their dtype whatever the others become."""
    derivations: Sequence[Derivation] = ()
    """Parameters that can be made of a head's rows."""

    def forms(self, name: str) -> Iterator[str]:
        """``name`` in all spellings: as it is, with the prefix, without it."""
        yield name
        yield self.prefix + name
        if name.startswith(self.prefix):
            yield name[len(self.prefix) :]

    def head_of(self, name: str) -> str:
        """The parameter of a head that was left out which ``name``, in any spelling, stands for; else an empty string."""
        for form in self.forms(name) if self.heads else ():
            if any(form.startswith(f"{head}.") or form == head for head in self.heads):
                return form
        return ""


def left_out(adapter: Adapter, parameter: str, dotted: str = "") -> str:
    """The rule under which a head's ``parameter`` is dropped, of the adapter of the module ``dotted``."""
    head = next(each for each in adapter.heads if parameter == each or parameter.startswith(f"{each}."))
    return f"pooling does without {dotted}{head}"


class Rows:
    """Keeps the rows, as a stream passes, from which parameters of ``adapters``, by dotted prefix, may have to be made."""

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        self._derivations = [(dotted, each) for dotted, adapter in adapters.items() for each in adapter.derivations]
        self.forget()  # those of a stream that broke off

    def keep(self, names: Collection[str], tensor: Tensor) -> Iterator[int]:
        """Copy the rows that are needed of the stored tensor of the parameters ``names``; gives the bytes of each copy."""
        for dotted, derivation in self._derivations:
            for source in derivation.sources:
                if dotted + source in names:
                    yield derivation.keep(source, tensor)

    def missing(self, arrived: Collection[str]) -> Iterator[tuple[str, Derivation]]:
        """The parameters that have not come."""
        for dotted, derivation in self._derivations:
            if dotted + derivation.target not in arrived:
                yield dotted + derivation.target, derivation

    def forget(self) -> None:
        """Let go of all rows."""
        for _, derivation in self._derivations:
            derivation.kept.clear()
