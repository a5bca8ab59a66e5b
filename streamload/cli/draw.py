"""How the commands show things: sizes, tables, JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from streamload.loading import LoadPlan, LoadReport
    from streamload.loading.keys import Keys

# A pipe has no width: names stay in one piece there, so that they can be searched for.
_PIPE = 10_000
console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else _PIPE)


def plain(text: str) -> str:
    """``text`` with its control characters spelled out: names come from files, and must not steer a terminal."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def size(nbytes: float) -> str:
    """``nbytes`` in MiB or GiB, as memory is counted."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout."""
    _write(json.dumps(value, indent=2) + "\n")  # past rich, which takes seconds for a large catalog


def _write(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader has left; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def print_rows(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print two columns without frames. File and tensor names are shown as they are, never as markup."""
    table = Table(title=Text(plain(title)), title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(plain(value)))
    _print(table)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> None:
    """Print a table with ``headers``; columns in ``right`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    numbers = set(right)
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(value)) for value in row))
    _print(table)


def _print(table: Table) -> None:
    """Print ``table``; into a pipe without the blanks that fill its last column."""
    if console.width < _PIPE:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    _write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def key_rows(keys: Keys) -> list[tuple[str, str]]:
    """What became of the names, in rows."""
    from streamload.loading.keys import STRANDED, summarise

    rows = []
    if keys.missing_keys:
        rows.append((f"missing ({len(keys.missing_keys)})", summarise(keys.missing_keys, keys.known)))
    if keys.unexpected_keys:
        rows.append((f"unexpected ({len(keys.unexpected_keys)})", summarise(keys.unexpected_keys)))
    if keys.stranded:
        rows.append((f"on meta ({len(keys.stranded)})", f"{summarise(keys.stranded)}: {STRANDED}"))
    rows += [("parts", str(each)) for each in keys.incomplete[:10]]
    rows += [("renamed", f"{name} {became}") for name, became in list(keys.renamed.items())[:10]]
    rows += [
        (
            f"mismatched ({len(keys.mismatched_keys)})",
            f"{each.name}: expected {each.expected}, found {each.found} in {each.file}",
        )
        for each in keys.mismatched_keys[:10]
    ]
    for rule in dict.fromkeys(keys.dropped.values()):
        names = [name for name, why in keys.dropped.items() if why == rule]
        rows.append((f"dropped ({len(names)})", f"{summarise(names)} [{rule}]"))
    if keys.tied:
        rows.append((f"tied ({len(keys.tied)})", ", ".join(f"{a} = {b}" for a, b in list(keys.tied.items())[:5])))
    if keys.casts:
        kinds = dict.fromkeys((cast.source, cast.target, cast.narrows) for cast in keys.casts)
        text = ", ".join(f"{a} to {b}{' (narrows)' if narrows else ''}" for a, b, narrows in kinds)
        rows.append((f"casts ({len(keys.casts)})", text))
    rows += [("note", note) for note in keys.notes]
    return rows


def plan_rows(plan: LoadPlan) -> list[tuple[str, str]]:
    """A plan in rows."""
    forecast = plan.forecast
    return [
        ("tensors", f"{len(plan.placements):,} to place, {size(plan.bytes_to_read)} to read"),
        *key_rows(plan),
        ("parameters", size(forecast.params_bytes)),
        ("staging", f"at most {size(forecast.staging_bytes)} ({plan.threads} threads)"),
        ("peak", size(forecast.peak_bytes)),
    ]


def report_rows(report: LoadReport, forecast_peak: int | None = None) -> list[tuple[str, str]]:
    """A report in rows."""
    rate = report.bytes_wanted / report.seconds / 1e9 if report.seconds else 0.0
    peak = size(report.peak_host_bytes)
    if forecast_peak is not None:
        peak += f" (forecast {size(forecast_peak)})"
    return [
        *key_rows(report),
        ("bytes", f"{report.bytes_wanted:,} wanted, {report.bytes_read:,} read"),
        ("time", f"{report.seconds:.3f} s, {rate:.2f} GB/s"),
        ("peak host memory", peak),
        ("clones", f"{report.clones} ({size(report.clone_bytes)})"),
    ]
