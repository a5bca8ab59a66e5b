"""Load a checkpoint in one of several ways and check it, in a process that somebody else has limited.

``python -m tests.loading.constrained WAY PATH`` prints JSON. With WAY ``none`` nothing is loaded: then ``usage`` tells
what Python and torch take before a load begins.
"""

from __future__ import annotations

import json
import sys
import time

import safetensors
import safetensors.torch
import torch

from streamload import Checkpoint, load
from streamload.memory.meter import trim
from streamload.testing import module_of
from tests.big import block, wrong_tensors
from tests.cache import evict
from tests.limited import own_usage


def main(way: str, path: str) -> None:
    checkpoint = Checkpoint.open(path)
    shapes = {name: spec.shape for name, spec in checkpoint.tensors.items()}
    # Real memory, but untouched: it takes nothing until a loader writes into it.
    module = module_of({name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
    parameters = dict(module.named_parameters())
    block()  # made now, so that checking takes no more memory than is there before the load
    trim()
    evict(path)
    usage, started, budget = own_usage(), time.perf_counter(), None
    if way == "streamload":
        budget = load(module, checkpoint).peak_host_bytes
    elif way == "shared":
        budget = load(module, checkpoint, backend="mmap", share=True).peak_host_bytes
        parameters = dict(module.named_parameters())
    elif way == "safe_open":
        with safetensors.safe_open(path, "pt") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118  it is no dict
                parameters[name].copy_(file.get_tensor(name))
    elif way == "load_file":
        module.load_state_dict(safetensors.torch.load_file(path))
    seconds = time.perf_counter() - started
    wrong = [] if way == "none" else wrong_tensors(parameters, shapes)
    print(json.dumps({"usage": usage, "seconds": seconds, "wrong": wrong, "peak": budget}))


if __name__ == "__main__":
    main(*sys.argv[1:])
