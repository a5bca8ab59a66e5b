"""What a module says of itself when it was made of another by leaving heads out: how stored names are spelled in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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


def left_out(head: str) -> str:
    """The rule under which a head's weights are dropped."""
    return f"pooling does without {head.rpartition('.')[0] or head}"
