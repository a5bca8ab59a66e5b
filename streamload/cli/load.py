"""``streamload load``: load a checkpoint into the transformers class that its folder names, and report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console

from streamload.checkpoint import Checkpoint
from streamload.cli import options
from streamload.cli.draw import print_json, print_rows, report_rows, size
from streamload.errors import LoadError

if TYPE_CHECKING:
    from streamload.loading import Progress


@click.command("load")
@options.location
@options.as_json
@options.revision
@options.dtype
@options.device
@options.memory_limit
@options.backend
@options.threads
@options.no_progress
@click.option("--base", is_flag=True, help="Load the model without its head (transformers' AutoModel).")
@click.option("--lenient", is_flag=True, help="Load what fits; report what does not, with exit code 1.")
def command(
    location: str,
    as_json: bool,
    revision: str | None,
    dtype: str | None,
    device: str | None,
    memory_limit: str,
    backend: str,
    threads: int | None,
    no_progress: bool,
    base: bool,
    lenient: bool,
) -> None:
    """Load the checkpoint at LOCATION into the class that its config.json names, and print the report."""
    checkpoint = Checkpoint.open(location, revision=revision)  # before torch is imported: a wrong path is told at once

    from streamload.integrations.transformers import build_model
    from streamload.loading import load, plan
    from streamload.sources.dtypes import dtype_code, torch_dtype

    own = torch_dtype(dtype_code(dtype)) if dtype is not None else None
    model = build_model(checkpoint, base=base, dtype=own)
    forecast = plan(
        model, checkpoint, device=device, memory_limit=memory_limit, backend=backend, threads=threads
    ).forecast
    try:
        with progress_bar(hidden=no_progress or as_json) as show:
            report = load(
                model,
                checkpoint,
                strict=not lenient,
                device=device,
                memory_limit=memory_limit,
                backend=backend,
                threads=threads,
                progress=show,
            )
    except LoadError as error:
        if as_json and error.report is not None:
            print_json({"model": type(model).__name__, **error.report.to_dict(), "error": str(error)})
        if lenient or error.report is None or error.report.ok:
            raise
        raise LoadError(f"{error}; here: --lenient", report=error.report) from error
    if as_json:
        print_json({"model": type(model).__name__, **report.to_dict(), "forecast": forecast.to_dict()})
    else:
        print_rows(f"{checkpoint.location} into {type(model).__name__}", report_rows(report, forecast.peak_bytes))
    sys.exit(0 if report.ok else 1)


@contextmanager
def progress_bar(*, hidden: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar on stderr with bytes, rate and this process's memory; ``None`` when hidden or stderr is no terminal."""
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    from streamload.memory import resident

    columns = (BarColumn(bar_width=24), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Bar(*columns, TextColumn("{task.fields[memory]}"), console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None, memory="")

        def show(state: Progress) -> None:
            memory = resident()
            text = f"memory {size(memory.anon)}"
            bar.update(task, total=state.bytes_total, completed=state.bytes_done, memory=text)

        yield show
