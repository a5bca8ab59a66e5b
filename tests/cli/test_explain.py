"""``streamload explain``: where a stored tensor goes, what fills a parameter, and the exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.cli.test_commands import MODEL, run, run_alone

MAPPERS = """
from streamload import WeightsMapper
mapper = WeightsMapper(
    orig_to_new_prefix={"model.": "language_model.model.", "lm_head.": None},
    orig_to_new_stacked={"q_proj": ("qkv_proj", "q")},
)
class Model:
    hf_to_vllm_mapper = mapper
number = 3
"""


def refused(*arguments: object) -> str:
    done = run(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    return done.err


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts, as published: one tensor an expert. A tensor is missing and one too many."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "head_dim": 4}
    config = transformers.Qwen3MoeConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=3, num_experts_per_tok=1
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file({**tensors, "model.extra": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_one_expert_goes_to_its_rows(experts: Path) -> None:
    done = run_alone("explain", experts, "model.layers.0.mlp.experts.1.up_proj.weight")
    assert done.code == 0
    assert "model.layers.0.mlp.experts.gate_up_proj[1:2, 4:8, 0:8] by transformers' conversion of" in done.out


def test_what_fills_a_parameter(experts: Path) -> None:
    done = run("explain", experts, "model.layers.0.mlp.experts.gate_up_proj", "--json")
    assert done.code == 0
    kinds = ("gate_proj", "up_proj")
    assert sorted(done.json["sources"]) == [
        f"model.layers.0.mlp.experts.{n}.{kind}.weight" for n in range(3) for kind in kinds
    ]
    assert done.json["targets"] == []
    assert {"what": "parameter", "text": "float32 [3, 8, 8]"} in done.json["rows"]


def test_what_finds_no_place_is_answered_with_code_1(experts: Path) -> None:
    done = run("explain", experts, "model.extra")
    assert (done.code, "unexpected  the model has no parameter of this name" in done.out) == (1, True)
    done = run("explain", experts, "model.norm.weight")
    assert (done.code, "missing    nothing in the checkpoint fills it" in done.out) == (1, True)


def test_a_dropped_tensor_names_its_rule() -> None:
    done = run("explain", MODEL, "embeddings.position_ids")
    assert (done.code, "dropped  recomputed buffer" in done.out) == (0, True)


def test_a_name_that_nobody_knows_is_refused_with_close_ones() -> None:
    said = refused("explain", MODEL, "pooler.dense.wieght")
    assert (
        "stores no tensor 'pooler.dense.wieght', and the model has no such parameter; close to it: pooler.dense."
        in said
    )


@pytest.mark.parametrize("which", ["mapper", "Model"])
def test_a_mapper_of_the_users_own(experts: Path, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_mappers.py").write_text(MAPPERS)
    name = "model.layers.0.self_attn.q_proj.weight"
    done = run("explain", experts, name, "--mapper", f"own_mappers:{which}", "--json")
    assert done.code == 0
    assert (done.json["mapped"], done.json["shard"]) == ("language_model.model.layers.0.self_attn.qkv_proj.weight", "q")
    assert [step["stage"] for step in done.json["steps"]] == ["stacked", "prefix"]
    done = run("explain", experts, "lm_head.weight", "--mapper", f"own_mappers:{which}")
    assert (done.code, "= dropped" in done.out) == (0, True)


def test_what_is_no_mapper_is_refused(experts: Path) -> None:
    assert "expected MODULE:OBJECT" in refused("explain", experts, "lm_head.weight", "--mapper", "json")
    assert "no attribute 'Mapper'" in refused("explain", experts, "lm_head.weight", "--mapper", "json:Mapper")
    assert "no mapper, and none in it" in refused("explain", experts, "lm_head.weight", "--mapper", "json:loads")
