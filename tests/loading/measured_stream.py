"""Load 2 GiB from a ring of one slot and print what it took: ``python -m tests.loading.measured_stream``."""

from __future__ import annotations

import json

import torch

from streamload import as_embedding_model, load, skeleton
from streamload.memory import resident
from streamload.testing import RingSource, module_of
from tests.loading.measured import peak_rss, reset_peak
from tests.pooling.models import GemmaLike

COUNT, ELEMENTS = 64, 16 << 20  # of bf16: 32 MiB each
ROOM = 8 << 20


def tensors(names):
    """One tensor after the other in the same memory; the ring copies it into its slot."""
    own = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    for number, name in enumerate(names):
        yield name, own.fill_(number + 1)


def measured(model, names):
    small = {name: torch.ones(1, dtype=torch.bfloat16) for name in ("a", "b")}
    load(module_of({name: torch.zeros(1, dtype=torch.bfloat16) for name in small}), RingSource(small))  # imports
    reset_peak()
    before = resident()
    report = load(model, RingSource(tensors(names)), memory_limit=ROOM)
    after, peak = resident(), peak_rss()
    params = [*model.parameters()]
    lent = 2 * ELEMENTS * 2  # the ring's slot, and what fills it
    return {
        "extra": peak - sum(before) - max(0, after.file - before.file) - sum(each.nbytes for each in params) - lent,
        "params": sum(each.nbytes for each in params),
        "clones": report.clones,
        "wrong": [n for n, each in enumerate(params) if not each[:: 1 << 20].eq(n + 1).all()],
    }


def main() -> None:
    plain = [f"layers.{n}.weight" for n in range(COUNT)]
    with skeleton():
        model = module_of({name: torch.empty(ELEMENTS, dtype=torch.bfloat16, device="meta") for name in plain})
    found = {"plain": measured(model, plain)}
    del model
    gemma = ["model.language_model.embed_tokens.weight"]
    gemma += [f"model.language_model.layers.{n}.weight" for n in range(COUNT - 1)]
    with skeleton():
        model = as_embedding_model(GemmaLike)(COUNT - 1, ELEMENTS).bfloat16()
    found["its own loader"] = measured(model, gemma)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
