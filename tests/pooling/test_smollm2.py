"""Real weights: SmolLM2-135M in both spellings becomes an embedding model through every source, bit for bit."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, LlamaForCausalLM, LlamaModel

from streamload import as_embedding_model, as_seq_cls_model, guard, load, skeleton, stream
from streamload.sources.stream import BACKENDS
from streamload.testing import RingSource
from tests.smollm2 import smollm2

pytestmark = pytest.mark.slow

TEXTS = ["The cat sat on the mat.", "A kitten lies on the rug.", "Quarterly revenue grew by eight percent."]


@pytest.fixture(scope="module")
def folders():
    return smollm2()


@pytest.fixture(scope="module")
def reference(folders):
    """transformers' own base model."""
    return AutoModel.from_pretrained(folders.causal, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def inputs(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders.causal)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer(TEXTS, padding=True, padding_side="left", return_tensors="pt")


@pytest.fixture(scope="module")
def expected(reference, inputs):
    with torch.inference_mode():
        hidden = reference(**inputs).last_hidden_state
    return torch.nn.functional.normalize(hidden[:, -1].float(), dim=-1)


def built(cls, folder):
    with skeleton():
        return as_embedding_model(cls)._from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()


def sources(folder):
    yield "load, auto", str(folder), {}
    yield "load, mmap", str(folder), {"backend": "mmap"}
    for backend in BACKENDS[1:]:
        yield f"stream, {backend}", stream(folder, backend=backend), {}
    yield "shared pages", str(folder), {"backend": "mmap", "share": True}
    yield "ring", RingSource(stream(folder, backend="mmap")), {}
    yield "guarded", guard(RingSource(stream(folder, backend="mmap"), slots=2), poison=True), {}
    yield "list", list(stream(folder, backend="mmap")), {}


@pytest.mark.parametrize("spelling", ["causal", "embedding"])
@pytest.mark.parametrize("cls", [LlamaForCausalLM, LlamaModel])
def test_every_source_gives_the_vectors_of_automodel(folders, reference, inputs, expected, spelling, cls):
    folder = getattr(folders, spelling)
    wanted = reference.state_dict()
    prefix = "model." if cls is LlamaForCausalLM else ""
    stored_prefix = "model." if spelling == "causal" else ""
    crossed = (spelling == "causal") == (cls is LlamaModel)  # a prefix has to be added or taken off: all sources
    for title, source, options in sources(folder):
        if not crossed and title not in ("load, auto", "stream, runai", "shared pages", "ring"):
            continue
        model = built(cls, folder)
        report = load(model, source, **options)
        assert report.ok, title
        assert report.clones == 0, title
        assert report.prefix == (prefix if not stored_prefix else ""), title
        found = model.state_dict()
        assert len(found) == len(wanted) == 272, title
        assert all(torch.equal(found[prefix + name], each) for name, each in wanted.items()), title
        if title in ("load, auto", "stream, runai", "shared pages"):
            with torch.inference_mode():
                assert torch.equal(model(**inputs), expected), title


def test_a_cat_is_like_a_kitten(expected):
    cosines = expected @ expected.T
    assert cosines[0, 1] > cosines[0, 2]
    assert cosines[0, 1] > cosines[1, 2]


def test_a_reranker_from_two_rows_of_the_tied_embedding(folders, reference, inputs):
    tokenizer = AutoTokenizer.from_pretrained(folders.causal)
    no, yes = (tokenizer.encode(word, add_special_tokens=False)[0] for word in (" no", " yes"))
    cls = as_seq_cls_model(LlamaForCausalLM, num_labels=1, method="from_2_way_softmax", classifier_from_token=[no, yes])
    rows = reference.get_input_embeddings().weight.float()
    with torch.inference_mode():
        last = reference(**inputs).last_hidden_state[:, -1].float()
        wanted = last @ (rows[yes] - rows[no])
    for folder in folders:
        for source in (str(folder), stream(folder, backend="runai"), RingSource(stream(folder, backend="mmap"))):
            with skeleton():
                model = cls._from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
            report = load(model, source)
            assert report.clone_bytes == (0 if isinstance(source, str) else 2 * 576 * 4)
            with torch.inference_mode():
                torch.testing.assert_close(model(**inputs)[:, 0], wanted, rtol=1e-5, atol=1e-5)
