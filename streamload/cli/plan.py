"""``streamload plan``: what a load would do and take, from headers alone."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from streamload.checkpoint import Checkpoint
from streamload.cli import options
from streamload.cli.draw import plan_rows, print_json, print_rows, size

if TYPE_CHECKING:
    from torch import nn


@click.command("plan")
@options.location
@options.as_json
@options.revision
@options.dtype
@options.device
@options.memory_limit
@options.backend
@options.threads
@click.option("--base", is_flag=True, help="Plan for the model without its head (transformers' AutoModel).")
def command(
    location: str,
    as_json: bool,
    revision: str | None,
    dtype: str | None,
    device: str | None,
    memory_limit: str,
    backend: str,
    threads: int | None,
    base: bool,
) -> None:
    """Plan loading the checkpoint at LOCATION into the transformers class that its folder names.

    A folder without config.json, or a single file, is planned against its own catalog: then only sizes are told. Exit code
    1 when names do not fit, or when the host has less memory than the forecast.
    """
    checkpoint = Checkpoint.open(location, revision=revision)  # before torch is imported: a wrong path is told at once

    from streamload.loading import plan
    from streamload.memory import Limits

    model, title = _target(checkpoint, dtype, base)
    own = dtype if isinstance(model, dict) else None  # a module has been built in it, as ``streamload load`` does
    made = plan(
        model, checkpoint, dtype=own, device=device, memory_limit=memory_limit, backend=backend, threads=threads
    )
    binding = Limits.read().binding
    fits = binding is None or made.forecast.peak_bytes <= binding.available
    if as_json:
        limit = None if binding is None else {**binding._asdict(), "available": binding.available}
        print_json({"model": title, **made.to_dict(), "limit": limit, "fits": fits})
    else:
        rows = plan_rows(made)
        if binding is not None:
            verdict = "the peak fits" if fits else "the peak DOES NOT FIT"
            rows.append(("available", f"{size(binding.available)} by {binding.source}: {verdict}"))
        print_rows(f"{checkpoint.location} into {title}", rows)
    sys.exit(0 if fits and made.ok else 1)


def _target(
    checkpoint: Checkpoint, dtype: str | None, base: bool
) -> tuple[nn.Module | dict[str, tuple[str, tuple[int, ...]]], str]:
    """What to plan against, and what to call it."""
    from streamload.integrations.transformers import build_model, folder_of
    from streamload.sources.dtypes import dtype_code, torch_dtype

    if not os.path.exists(os.path.join(folder_of(checkpoint), "config.json")):
        return {spec.name: (spec.dtype, spec.shape) for spec in checkpoint.tensors.values()}, "its own catalog"
    own = torch_dtype(dtype_code(dtype)) if dtype is not None else None
    model = build_model(checkpoint, base=base, dtype=own)
    return model, type(model).__name__
