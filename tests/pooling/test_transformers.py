"""Classes of transformers as embedding models: from a checkpoint with a head and from the base model's, file and stream."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from streamload import LoadError, as_embedding_model, as_seq_cls_model, load, skeleton, stream
from streamload.testing import RingSource
from tests.integrations.architectures import Sizes, architectures

TEXT = [
    "Llama",
    "Qwen3",
    "Qwen3-MoE",
    "Mixtral",
    "Gemma3 text",
    "Gemma3 causal",
    "Cohere",
    "GPT-2",
    "BERT",
    "ModernBERT",
]


@pytest.mark.parametrize("architecture", TEXT)
@pytest.mark.parametrize("stored", ["with head", "base"])
def test_vectors_are_those_of_the_base_model(tmp_path, architecture, stored):
    model_class, config = architectures(Sizes())[architecture]
    torch.manual_seed(0)
    original = model_class(config()).eval()
    base = original.base_model
    (original if stored == "with head" else base).save_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 3, 7], [0, 0, 4, 8]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with torch.inference_mode():
        hidden = base(input_ids=ids, attention_mask=mask).last_hidden_state
    wanted = {name: each.clone() for name, each in base.state_dict().items()}
    for pooling in ("last", "mean") if architecture == "Llama" else ("last",):
        expected = hidden[:, -1] if pooling == "last" else torch.stack([hidden[0].mean(0), hidden[1, 2:].mean(0)])
        for source in (str(tmp_path), stream(tmp_path, backend="mmap"), RingSource(stream(tmp_path, backend="mmap"))):
            with skeleton():
                model = as_embedding_model(model_class, pooling=pooling, normalize=False)(
                    copy.deepcopy(config())
                ).eval()
            report = load(model, source)
            assert report.ok
            found = model.base_model if model.base_model is not model else model
            assert all(torch.equal(found.state_dict()[name], each) for name, each in wanted.items())
            with torch.inference_mode():
                vectors = model(input_ids=ids, attention_mask=mask)
            torch.testing.assert_close(vectors, expected.float(), rtol=1e-5, atol=1e-5)
            for name, parameter in model.named_parameters():
                assert not parameter.is_meta, name
                assert name.startswith(f"{model.base_model_prefix}.") or model.base_model is model, name


@pytest.mark.parametrize("tied", [True, False])
def test_a_score_comes_from_the_embedding_only_where_the_head_is_tied_to_it(tmp_path, tied):
    config = LlamaConfig(**Sizes().text, tie_word_embeddings=tied)
    base = LlamaForCausalLM(config).model
    base.save_pretrained(tmp_path)
    for cls in (LlamaForCausalLM, LlamaModel):
        made = as_seq_cls_model(cls, num_labels=1, method="from_2_way_softmax", classifier_from_token=[3, 9])
        for source in (str(tmp_path), RingSource(stream(tmp_path, backend="mmap"))):
            with skeleton():
                model = made(copy.deepcopy(config))
            if tied:
                load(model, source)
                rows = base.embed_tokens.weight
                assert torch.equal(model.score.weight[0], rows[9] - rows[3])
            else:
                with pytest.raises(
                    LoadError, match=r"score.weight: not stored, .* rows of lm_head.weight, none of which"
                ):
                    load(model, source)


def test_transformers_own_ways_work_with_an_adapted_class(tmp_path):
    config = LlamaConfig(**Sizes().text, tie_word_embeddings=True)
    original = LlamaForCausalLM(config)
    original.save_pretrained(tmp_path / "original")
    cls = as_embedding_model(LlamaForCausalLM)
    model = cls.from_pretrained(tmp_path / "original")
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight)
    model.resize_token_embeddings(70)
    assert model.get_output_embeddings() is None
    model.save_pretrained(tmp_path / "adapted")
    again = cls(copy.deepcopy(model.config))
    report = load(again, tmp_path / "adapted")
    assert report.ok
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert list(dict(again.named_children())) == ["model", "lm_head"]
