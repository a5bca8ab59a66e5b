"""Make a transformers model, or load it in fp32, in a process of its own; loading prints what it took as JSON.

``python -m tests.integrations.measured save|streamload|from_pretrained ARCHITECTURE FOLDER '{"width": 1024}'``. The peak is the
kernel's own (``VmHWM``), counted from just before the model is built.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from streamload import Checkpoint, load, plan
from streamload.integrations.transformers import build_model
from streamload.memory import resident
from tests.integrations.architectures import Sizes, architectures
from tests.loading.measured import peak_rss, reset_peak


def main(way: str, architecture: str, folder: str, sizes: str) -> None:
    model_class, config = architectures(Sizes(**json.loads(sizes)))[architecture]
    if way == "save":
        torch.set_default_dtype(torch.bfloat16)
        model_class(config()).save_pretrained(folder)
        return
    checkpoint = Checkpoint.open(folder)
    forecast = plan(
        build_model(checkpoint, dtype=torch.float32), checkpoint
    ).forecast  # imports all that either of the two needs
    reset_peak()
    before, started = resident(), time.perf_counter()
    if way == "streamload":
        model = build_model(checkpoint, dtype=torch.float32)
        load(model, checkpoint)
    else:
        model = model_class.from_pretrained(folder, dtype=torch.float32)
    seconds, after = time.perf_counter() - started, resident()
    libraries = max(0, after.file - before.file)
    tensors = {each.data_ptr(): each.nbytes for each in [*model.parameters(), *model.buffers()]}
    print(
        json.dumps(
            {
                "params": sum(tensors.values()),
                "extra": peak_rss() - sum(before) - libraries - sum(tensors.values()),
                "staging": forecast.staging_bytes,
                "stored": checkpoint.nbytes,
                "seconds": seconds,
                "sum": sum(float(each.detach().double().sum()) for each in model.parameters()),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
