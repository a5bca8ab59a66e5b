"""``streamload bench``: what loading a checkpoint for pooling takes, ours and as it used to be, side by side."""

from __future__ import annotations

import click

from streamload.checkpoint import Checkpoint
from streamload.cli import options
from streamload.cli.draw import plain, print_json, print_table, size

_BACKENDS = ("direct", "mmap", "safetensors", "safetensors-mmap", "runai")


@click.command("bench")
@options.location
@options.as_json
@click.option("--backend", "backends", multiple=True, help=f"Sources to compare; by default {', '.join(_BACKENDS)}.")
def command(location: str, as_json: bool, backends: tuple[str, ...]) -> None:
    """Load the checkpoint at LOCATION into a model of its names, through each source in three ways, each in a fresh process.

    "streamload" decides how names are spelled from the names, and loads as the tensors come; "historic" clones until a name is
    at home without asking the model's mapper, and keeps the clones; "list" keeps all tensors before it loads. Told is the
    anonymous memory beyond the parameters at its peak, what was cloned, and the time.
    """
    Checkpoint.open(location)  # a wrong path is told at once

    from streamload.benchmark import compare
    from streamload.sources.stream import check_backend

    for backend in backends:
        check_backend(backend)
    found = [*compare(location, backends or _BACKENDS)]
    if as_json:
        print_json([each._asdict() for each in found])
        return
    rows = [
        (each.backend, each.way, size(each.beyond), f"{each.clones:,}", size(each.clone_bytes), f"{each.seconds:.2f} s")
        for each in found
    ]
    click.echo(f"{plain(location)}: {size(found[0].params)} of parameters")
    print_table(("source", "way", "beyond parameters", "clones", "cloned", "time"), rows, right=range(2, 6))
