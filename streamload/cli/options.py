"""Arguments that several commands share."""

from __future__ import annotations

import click

location = click.argument("location")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
revision = click.option("--revision", help="Branch or commit, for a model in the Hugging Face cache.")
dtype = click.option("--dtype", help="What plain floats become: float32, bfloat16, ...")
device = click.option("--device", help="Where the weights go: cpu, cuda, cuda:1, ...")
memory_limit = click.option(
    "--memory-limit",
    default="auto",
    show_default=True,
    help='Host memory beyond the parameters: "32MiB", "10%", or auto.',
)
backend = click.option("--backend", default="auto", show_default=True, help="How the bytes are read: auto or direct.")
threads = click.option("--threads", type=click.IntRange(min=1), help="Reading threads.")
no_progress = click.option("--no-progress", is_flag=True, help="Draw no progress bar.")
