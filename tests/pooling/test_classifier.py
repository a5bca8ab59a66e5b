"""Score heads: shipped, or made of a head's rows in fp32, of which no more is read or kept than those rows."""

import copy
import pickle

import pytest
import torch
from torch import nn

from streamload import LoadError, as_embedding_model, as_seq_cls_model, load, plan, skeleton, stream
from streamload.testing import RingSource, write_safetensors
from tests.pooling.models import Causal, PlainCausal, causal, check_causal

both = pytest.mark.parametrize("kind", [Causal, PlainCausal])


def sources(path, tensors):
    write_safetensors(path, tensors)
    yield "path", str(path), {}
    yield "mmap", str(path), {"backend": "mmap"}
    yield "runai", str(path), {"backend": "runai"}
    yield "stream", stream(path), {}
    yield "lent", stream(path, backend="fastsafetensors"), {}
    yield "ring", RingSource(tensors), {}
    yield "reversed", RingSource(dict(reversed(tensors.items()))), {}
    yield "dict", tensors, {}


def head_rows(vocab=2000, hidden=4):
    return torch.arange(vocab * hidden).view(vocab, hidden) + 100.0


def distinct(prefix="model.", **options):
    """Stored tensors whose head is no shifted embedding."""
    tensors = causal(prefix, **options)
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = (head_rows() ** 1.5).bfloat16()
    return tensors


@both
@pytest.mark.parametrize("prefix", ["", "model."])
def test_two_way_softmax_is_the_difference_of_two_rows_in_fp32(tmp_path, kind, prefix):
    tensors = distinct(prefix)
    head = tensors["lm_head.weight"].float()
    for title, source, options in sources(tmp_path / "m.safetensors", tensors):
        cls = as_seq_cls_model(kind, num_labels=1, method="from_2_way_softmax", classifier_from_token=[3, 1005])
        model = cls()
        report = load(model, source, **options)
        check_causal(model)
        assert torch.equal(model.score.weight, (head[1005] - head[3]).unsqueeze(0)), title
        assert report.ok
        assert report.clone_bytes <= 2 * 2 * 4 * 4, title  # two rows, of the head and perhaps of what it is tied to
        assert report.dropped["lm_head.weight"] == "pooling does without lm_head"


def test_only_the_rows_are_read_from_a_file(tmp_path):
    tensors = distinct()
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    cls = as_seq_cls_model(PlainCausal, num_labels=2, method="no_post_processing", classifier_from_token=[7, 1900])
    with skeleton():
        model = cls()
    made = plan(model, path)
    body = sum(each.nbytes for name, each in tensors.items() if name != "lm_head.weight")
    assert made.bytes_to_read == body + 2 * 8
    report = load(model, path)
    assert report.bytes_wanted == body + 2 * 8
    assert torch.equal(model.score.weight, tensors["lm_head.weight"][[7, 1900]].float())
    assert model.score.weight.dtype == torch.float32
    assert any(
        "score.weight (method='no_post_processing') from rows of lm_head.weight" in note for note in report.notes
    )


def test_the_score_stays_fp32_whatever_the_rest_becomes(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", distinct())
    cls = as_seq_cls_model(PlainCausal, num_labels=1, method="from_2_way_softmax", classifier_from_token=[3, 5])
    model = cls()
    load(model, path, dtype="bfloat16")
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.score.weight.dtype == torch.float32


@both
def test_a_tied_head_is_the_embedding(tmp_path, kind):
    tensors = causal(head=False)
    embedding = tensors["model.embed_tokens.weight"]
    for title, source, options in sources(tmp_path / "m.safetensors", tensors):
        cls = as_seq_cls_model(kind, num_labels=1, method="from_2_way_softmax", classifier_from_token=[3, 5])
        model = cls(tied=True)
        load(model, source, **options)
        assert torch.equal(model.score.weight, (embedding[5] - embedding[3]).unsqueeze(0)), title
        check_causal(model)


@both
def test_a_shipped_score_wins(tmp_path, kind):
    shipped = {"score.weight": torch.tensor([[1.0, 2, 3, 4]])}
    for tensors in (shipped | distinct(), distinct() | shipped, distinct("") | shipped):
        for title, source, options in sources(tmp_path / "m.safetensors", tensors):
            cls = as_seq_cls_model(kind, num_labels=1, method="from_2_way_softmax", classifier_from_token=[3, 5])
            model = cls()
            report = load(model, source, **options)
            assert model.score.weight.tolist() == [[1.0, 2, 3, 4]], title
            assert report.ok
            check_causal(model)


@both
def test_no_source_for_the_head_is_an_error(tmp_path, kind):
    tensors = causal(head=False)
    for title, source, options in sources(tmp_path / "m.safetensors", tensors):
        cls = as_seq_cls_model(kind, num_labels=1, method="from_2_way_softmax", classifier_from_token=[3, 5])
        with pytest.raises(LoadError, match=r"score.weight") as caught:
            load(cls(), source, **options)
        assert (
            "score.weight: not stored, and method='from_2_way_softmax' makes it of rows of lm_head.weight, none of which is "
            "stored"
        ) in str(caught.value), title
        with pytest.raises(LoadError, match=r"1 missing: score.weight"):
            load(as_seq_cls_model(kind, num_labels=3)(), tensors)


@both
def test_a_token_beyond_the_vocabulary_is_an_error(tmp_path, kind):
    cls = as_seq_cls_model(kind, num_labels=1, method="from_2_way_softmax", classifier_from_token=[3, 2000])
    for _, source, options in sources(tmp_path / "m.safetensors", distinct()):
        with pytest.raises(LoadError, match=r"is made of rows 3, 2000 of lm_head.weight, which has shape \[2000, 4\]"):
            load(cls(), source, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_labels": 0}, "expected at least one"),
        ({"num_labels": 1, "classifier_from_token": [1, 2]}, "needs a method"),
        ({"num_labels": 1, "method": "softmax"}, "expected one of from_2_way_softmax, no_post_processing"),
        (
            {"num_labels": 2, "method": "from_2_way_softmax", "classifier_from_token": [1, 2]},
            "two tokens and num_labels=1",
        ),
        ({"num_labels": 1, "method": "from_2_way_softmax", "classifier_from_token": [1]}, "found 1 and 1"),
        (
            {"num_labels": 3, "method": "no_post_processing", "classifier_from_token": [1]},
            "a token for each of 3 labels",
        ),
        ({"num_labels": 2, "method": "no_post_processing", "classifier_from_token": ["no", "yes"]}, "found 'no'"),
        ({"num_labels": 1, "pooling": "first"}, "pooling='first': expected one of last, mean, cls, max"),
    ],
)
def test_odd_options_are_refused(options, message):
    with pytest.raises(LoadError, match=message):
        as_seq_cls_model(PlainCausal, **options)


def test_classes_are_made_once_and_not_of_each_other():
    assert as_embedding_model(PlainCausal) is as_embedding_model(PlainCausal)
    assert as_embedding_model(PlainCausal, pooling="mean") is not as_embedding_model(PlainCausal)
    embedding = as_embedding_model(PlainCausal)
    assert as_seq_cls_model(embedding, num_labels=1) is as_seq_cls_model(PlainCausal, num_labels=1)
    assert issubclass(embedding, PlainCausal)
    assert embedding.__name__ == "PlainCausalForEmbedding"
    with pytest.raises(LoadError, match="expected a class of modules"):
        as_embedding_model(PlainCausal())


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 3)

    def forward(self, input_ids, attention_mask=None):
        return (self.embed_tokens(input_ids).bfloat16(),)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(3, 10, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["last", "cls", "mean", "max"])
def test_pooling_looks_at_real_tokens_only_whatever_the_padding(pooling, side):
    model = as_embedding_model(Small, pooling=pooling, normalize=False)()
    table = torch.arange(30.0).view(10, 3)
    load(model, {"model.embed_tokens.weight": table})
    texts = [[4, 2, 7], [5]]
    ids, mask = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)
    for row, text in enumerate(texts):
        at = slice(4 - len(text), 4) if side == "left" else slice(0, len(text))
        ids[row, at], mask[row, at] = torch.tensor(text), 1
    found = model(ids, attention_mask=mask)
    expected = {
        "last": lambda text: table[text[-1]],
        "cls": lambda text: table[text[0]],
        "mean": lambda text: table[text].mean(0),
        "max": lambda text: table[text].amax(0),
    }[pooling]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack([expected(text) for text in texts]))
    assert torch.equal(model(ids, mask), found)  # by position
    one = as_embedding_model(Small, pooling=pooling)()
    load(one, {"model.embed_tokens.weight": table})
    torch.testing.assert_close(one(ids, mask).norm(dim=1), torch.ones(2))
    without = model(ids[:1, 1:4] if side == "left" else ids[:1, :3])
    torch.testing.assert_close(without, found[:1])


def test_a_head_that_was_left_out_cannot_be_used_by_mistake():
    model = as_embedding_model(Small)()
    with pytest.raises(LoadError, match="lm_head of SmallForEmbedding was left out"):
        model.lm_head(torch.ones(1, 3))
    with pytest.raises(LoadError, match="has no module 'head'"):
        as_embedding_model(Small, heads=["head"])()
    kept = as_embedding_model(Small, heads=[])()
    assert kept.lm_head.weight.shape == (10, 3)


def test_scores_are_those_of_the_pooled_state_in_fp32():
    model = as_seq_cls_model(Small, num_labels=2, bias=True)()
    table = torch.arange(30.0).view(10, 3)
    score = {"score.weight": torch.tensor([[1.0, 0, 0], [0, 0, 2]]), "score.bias": torch.tensor([0.5, -0.5])}
    load(model, {"model.embed_tokens.weight": table} | score)
    assert model(torch.tensor([[1, 4]])).tolist() == [[12.5, 27.5]]


def test_adapted_models_can_be_copied_and_pickled():
    for made in (
        as_embedding_model(PlainCausal, pooling="mean"),
        as_seq_cls_model(PlainCausal, num_labels=1, method="from_2_way_softmax", classifier_from_token=[3, 5]),
    ):
        model = made()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(copied) is made
            load(copied, distinct(""))
            check_causal(copied)
            assert not torch.equal(model.model.embed_tokens.weight, copied.model.embed_tokens.weight)
