"""Anonymous memory beyond the parameters: our probe, the historic one, and a list, through each source.

    python bench/bench_memory.py [FOLDER ...] [> docs/memory.md]

Without a folder: SmolLM2-135M (real, both spellings) and a Gemma4-like checkpoint of 2 GB, 2,000 tensors whose names no probe
finds at home without the model's mapper. Each row is a process of its own. Prints tables.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests

from streamload.benchmark import compare
from tests.big import write_big
from tests.smollm2 import smollm2

ABOUT = (
    "Anonymous memory beyond the parameters at its peak, sampled every 2 ms; each row is a process of its own. "
    "`streamload` is `load(as_embedding_model(...), stream(...))`, `historic` a probe that asks no mapper and keeps its clones, "
    "`list` keeps all tensors first (cloned where they are lent, or the ring would be used up)."
)
BACKENDS = ("direct", "mmap", "safetensors", "safetensors-mmap", "runai", "fastsafetensors")
GEMMA = {"model.language_model.embed_tokens.weight": (32768, 1024)} | {
    f"model.language_model.layers.{n}.weight": (468, 1024) for n in range(1999)
}


def table(title: str, location: str) -> None:
    print(f"\n{title}\n")
    print("| source | way | beyond the parameters, MiB | clones | cloned, MiB | s |")
    print("|---|---|--:|--:|--:|--:|")
    for each in compare(location, BACKENDS):
        mib = [f"{number / 2**20:,.1f}" for number in (each.beyond, each.clone_bytes)]
        print(
            f"| {each.backend} | {each.way} | {mib[0]} | {each.clones:,} | {mib[1]} | {each.seconds:.2f} |", flush=True
        )


def main(folders: list[str]) -> None:
    if folders:
        for folder in folders:
            table(folder, folder)
        return
    print("# Memory of loading for pooling\n")
    print(f"Written by `python bench/bench_memory.py` on {date.today()}, torch {torch.__version__}. {ABOUT}")
    real = smollm2()
    table("SmolLM2-135M, names with `model.`, 257 MiB", str(real.causal))
    table("SmolLM2-135M, names without, 257 MiB", str(real.embedding))
    with tempfile.TemporaryDirectory() as folder:
        path = write_big(Path(folder) / "model.safetensors", GEMMA)
        table(f"Gemma4-like, 2,000 tensors, {Path(path).stat().st_size / 2**20:,.0f} MiB", path)


if __name__ == "__main__":
    main(sys.argv[1:])
