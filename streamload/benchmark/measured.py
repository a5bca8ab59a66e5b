"""One way of loading in a process of its own; prints what it took as JSON.

``python -m streamload.benchmark.measured LOCATION BACKEND WAY``
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator

from torch import Tensor

from streamload.benchmark.historic import historic_load
from streamload.benchmark.mirror import Mirror
from streamload.checkpoint import Checkpoint
from streamload.loading import load
from streamload.memory import Meter
from streamload.memory.clones import count_clones
from streamload.memory.meter import trim
from streamload.pooling import as_embedding_model
from streamload.sources.stream import stream


def main(location: str, backend: str, way: str) -> None:
    """Load and print."""
    checkpoint = Checkpoint.open(location)
    model = (Mirror if way == "historic" else as_embedding_model(Mirror))(checkpoint)
    with stream(checkpoint, backend=backend) as warm_up:  # imports what the backend needs
        next(warm_up, None)
    trim()
    lends = backend in ("runai", "fastsafetensors")
    started = time.perf_counter()
    with Meter(0.002) as meter, count_clones() as clones:
        source = stream(checkpoint, backend=backend)
        if way == "historic":
            historic_load(model, _sampled(source, meter))
        elif way == "list":
            load(model, [(name, tensor.clone() if lends or backend in _REUSED else tensor) for name, tensor in source])
        else:
            load(model, source)
    seconds = time.perf_counter() - started
    params = sum(each.nbytes for each in model.parameters())
    found = {"beyond": max(0, meter.growth - params), "clones": clones.count, "clone_bytes": clones.nbytes}
    print(json.dumps(found | {"seconds": seconds, "params": params}))


#: Sources whose buffers are used up by one who keeps all tensors.
_REUSED = ("auto", "direct")


def _sampled(source: Iterable[tuple[str, Tensor]], meter: Meter) -> Iterator[tuple[str, Tensor]]:
    for item in source:
        meter.sample()
        yield item
        del item


if __name__ == "__main__":
    main(*sys.argv[1:])
