"""``streamload embed``: vectors of texts."""

from __future__ import annotations

import click

from streamload.cli import options
from streamload.cli.draw import console, print_json, print_rows, print_table, report_rows
from streamload.cli.load import progress_bar


@click.command("embed")
@options.location
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True)
@options.as_json
@options.revision
@options.dtype
@options.device
@options.memory_limit
@options.backend
@options.no_progress
def command(
    location: str,
    texts: tuple[str, ...],
    as_json: bool,
    revision: str | None,
    dtype: str | None,
    device: str | None,
    memory_limit: str,
    backend: str,
    no_progress: bool,
) -> None:
    """Embed each TEXT with the model at LOCATION; print the vectors' beginnings, or all of them with --json."""
    from streamload.embedder import Embedder

    with progress_bar(hidden=no_progress or as_json) as show:
        embedder = Embedder.from_pretrained(
            location,
            dtype=dtype,
            device=device,
            memory_limit=memory_limit,
            backend=backend,
            revision=revision,
            progress=show,
        )
    vectors = embedder.encode(texts)
    if as_json:
        print_json({"texts": list(texts), "embeddings": vectors.tolist(), "report": embedder.report.to_dict()})
        return
    rows = [
        (text if len(text) <= 60 else text[:57] + "...", ", ".join(f"{value:.6f}" for value in vector[:5]) + ", ...")
        for text, vector in zip(texts, vectors.tolist(), strict=True)
    ]
    print_table(("text", f"vector [{vectors.shape[1]}]"), rows)
    if len(texts) > 1:
        unit = vectors / vectors.norm(dim=1, keepdim=True)
        numbers = [f"{number}" for number in range(1, len(texts) + 1)]
        values = [tuple(f"{value:.4f}" for value in row) for row in (unit @ unit.T).tolist()]
        cosines = [(number, *row) for number, row in zip(numbers, values, strict=True)]
        console.print()
        print_table(("cosine", *numbers), cosines, right=range(1, len(texts) + 1))
    console.print()
    print_rows("modules: " + ", ".join(embedder.recipe.applied), report_rows(embedder.report))
