"""What the sizes of fused parts tell about each other, where no module says what they have to be."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from streamload.loading.fused import Fused, show
from streamload.mapping.rules import Part

Partition = Mapping[tuple[Part, ...], int]


def cut_otherwise(fused: Iterable[Fused]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Parameters whose parts are not as long as those of another of the same module, such as a bias: what was expected of
    them, and found.
    """
    first: dict[tuple[str, int], tuple[str, Partition]] = {}
    for each in fused:
        module, _, leaf = each.target.name.rpartition(".")
        if own := each.partition():
            name, other = first.setdefault((module, sum(own.values())), (leaf, own))
            if other != own and other.keys() == own.keys():
                yield each.target.name, (f"parts cut as those of {module}.{name} ({show(other)})", show(own))


def notes_on_sizes(fused: Iterable[Fused]) -> Iterator[str]:
    """Sizes that only the checkpoint tells and that are unusual: k and v, or two numbered parts, of different length,
    and layers that are cut in different ways.
    """
    alike: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unequal: dict[tuple[str, int], bool] = {}
    for each in fused:
        if each.unused_sizes:
            yield (
                f"{each.target.name}: its module's output_sizes has {each.unused_sizes} entries for {each.count} parts, so the "
                "sizes are those of the checkpoint"
            )
        if not each.told and (own := each.partition()):
            key = re.sub(r"(?<![^.])\d+(?![^.])", "*", each.target.name), sum(own.values())
            alike[key][show(own)].append(each.target.name)
            unequal[key] = unequal.get(key, False) or _unequal(own)
    for key, cuts in alike.items():
        template, total = key
        if len(cuts) > 1:
            ways = "; ".join(f"{cut} in {names[0]}{_more(names)}" for cut, names in list(cuts.items())[:4])
            yield f"{template}: its {total} rows are not cut alike in all layers: {ways}"
        elif unequal[key]:
            yield f"{template}: cut into {next(iter(cuts))} as the checkpoint has it, with nothing in the module to check it by"


def _unequal(partition: Partition) -> bool:
    twins = [size for parts, size in partition.items() if parts in (("k",), ("v",))]
    if len(partition) == 2 and all(isinstance(parts[0], int) for parts in partition):
        twins = [*partition.values()]
    return len(set(twins)) > 1


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
