"""``streamload inspect``: what a checkpoint holds, from headers alone, without torch."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import click

from streamload.checkpoint import Checkpoint
from streamload.cli import options
from streamload.cli.draw import console, print_json, print_rows, print_table, size


@click.command("inspect")
@options.location
@options.as_json
@options.revision
@click.option("--tensors", "show_tensors", is_flag=True, help="List every tensor.")
def command(location: str, as_json: bool, revision: str | None, show_tensors: bool) -> None:
    """Show the catalog of the checkpoint at LOCATION (a folder, a file, or a cached model)."""
    checkpoint = Checkpoint.open(location, revision=revision)
    if as_json:
        print_json(_as_dict(checkpoint))
        return
    print_summary(checkpoint)
    if show_tensors:
        console.print()
        rows = [
            (
                spec.name,
                spec.dtype,
                str(list(spec.shape)),
                size(spec.nbytes),
                os.path.basename(spec.file),
                f"{spec.offset:,}",
            )
            for spec in checkpoint.tensors.values()
        ]
        print_table(("tensor", "dtype", "shape", "size", "file", "offset"), rows, right=(3, 5))


def print_summary(checkpoint: Checkpoint) -> None:
    """The catalog in a few lines."""
    counts = Counter(spec.dtype for spec in checkpoint.tensors.values())
    nbytes: Counter[str] = Counter()
    for spec in checkpoint.tensors.values():
        nbytes[spec.dtype] += spec.nbytes
    largest = max(checkpoint.tensors.values(), key=lambda spec: spec.nbytes, default=None)
    rows = [
        (
            "files",
            f"{len(checkpoint.files)}: {', '.join(map(os.path.basename, checkpoint.files[:4]))}" + _more(checkpoint),
        ),
        ("tensors", f"{len(checkpoint):,}, {size(checkpoint.nbytes)} ({checkpoint.nbytes:,} bytes)"),
        *(
            (f"  {dtype}", f"{counts[dtype]:,}, {size(nbytes[dtype])}")
            for dtype in sorted(counts, key=lambda d: -nbytes[d])
        ),
    ]
    if largest is not None:
        rows.append(("largest", f"{largest.name} {largest.dtype} {list(largest.shape)}, {size(largest.nbytes)}"))
    rows += [("metadata", f"{key}: {value[:120]}") for key, value in list(checkpoint.metadata.items())[:8]]
    rows += [("ignored", f"{name}: {why}") for name, why in list(checkpoint.ignored.items())[:12]]
    rows += [("note", note) for note in checkpoint.notes]
    print_rows(checkpoint.location, rows)


def _more(checkpoint: Checkpoint) -> str:
    return ", ..." if len(checkpoint.files) > 4 else ""


def _as_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "location": checkpoint.location,
        "files": list(checkpoint.files),
        "nbytes": checkpoint.nbytes,
        "tensors": {
            spec.name: {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "file": spec.file,
                "offset": spec.offset,
                "nbytes": spec.nbytes,
            }
            for spec in checkpoint.tensors.values()
        },
        "ignored": checkpoint.ignored,
        "skipped": [f"{spec.name} in {spec.file}" for spec in checkpoint.skipped],
        "notes": list(checkpoint.notes),
        "metadata": checkpoint.metadata,
    }
