"""Arguments that several commands share."""

from __future__ import annotations

import click


def _check_device(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        import torch

        try:
            kind = torch.device(value).type
        except RuntimeError as error:
            raise click.BadParameter(f"{value!r}: {str(error).splitlines()[0]}") from error
        if kind == "meta":
            raise click.BadParameter("weights cannot be read to 'meta', which has no memory")
    return value


location = click.argument("location")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
revision = click.option("--revision", help="Branch or commit, for a model in the Hugging Face cache.")
dtype = click.option("--dtype", help="What plain floats become: float32, bfloat16, ...")
device = click.option("--device", callback=_check_device, help="Where the weights go: cpu, cuda, cuda:1, ...")
memory_limit = click.option(
    "--memory-limit",
    default="auto",
    show_default=True,
    help='Host memory beyond the parameters: "32MiB", "10%", or auto.',
)
backend = click.option(
    "--backend", default="auto", show_default=True, help="How the bytes are read: auto, mmap, safetensors, runai, ..."
)
threads = click.option("--threads", type=click.IntRange(min=1), help="Reading threads.")
no_progress = click.option("--no-progress", is_flag=True, help="Draw no progress bar.")
