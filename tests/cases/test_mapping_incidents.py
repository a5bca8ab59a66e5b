"""The four mapping incidents, with names and shapes as published and tiny sizes."""

import pytest
import torch
from torch import nn

from streamload import LoadError, WeightsMapper, load, plan
from streamload.testing import module_of, write_safetensors

QKV = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}
DOTTED = {f".{old}": (f".{new}", shard) for old, (new, shard) in QKV.items()}
BLOCK = "model.vit_merger.self_attn"


def part(value, count=4):
    return torch.full((count, 8), float(value))


def empty(shapes):
    return module_of({name: torch.full(shape, float("nan")) for name, shape in shapes.items()})


def minicpm():
    """A vision merger that fuses beside a vision tower and a language model that do not."""
    stored = {}
    for number, path in enumerate(
        (BLOCK, "model.vpm.encoder.layers.0.self_attn", "model.language_model.layers.0.self_attn")
    ):
        for offset, name in enumerate("qkv"):
            stored[f"{path}.{name}_proj.weight"] = part(10 * number + offset)
    shapes = {"vit_merger.self_attn.qkv_proj.weight": (12, 8)}
    shapes |= {f"vpm.encoder.layers.0.self_attn.{name}_proj.weight": (4, 8) for name in "qkv"}
    shapes |= {f"language_model.model.layers.0.self_attn.{name}_proj.weight": (4, 8) for name in "qkv"}
    return stored, shapes


PREFIXES = {
    "model.vit_merger.": "vit_merger.",
    "model.vpm.": "vpm.",
    "model.language_model.": "language_model.model.",
}


@pytest.mark.parametrize("rules", [QKV, DOTTED], ids=["bare", "dotted"])
@pytest.mark.parametrize("where", ["model", "submodule"])
def test_1_minicpm_v_4_6_fuses_the_merger_only(tmp_path, rules, where):
    stored, shapes = minicpm()
    path = write_safetensors(tmp_path / "m.safetensors", stored)
    model = empty(shapes)
    if where == "model":
        model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=rules, orig_to_new_prefix=PREFIXES)
    else:
        model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix=PREFIXES)
        model.vit_merger.hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=rules)
    report = load(model, path)
    assert report.ok
    fused = model.vit_merger.self_attn.qkv_proj.weight
    assert torch.equal(fused, torch.cat([part(0), part(1), part(2)]))
    assert torch.equal(model.vpm.encoder.layers.get_submodule("0").self_attn.k_proj.weight, part(11))
    assert torch.equal(model.language_model.model.layers.get_submodule("0").self_attn.v_proj.weight, part(22))


def test_1_says_what_is_wrong_when_a_rule_is_missing(tmp_path):
    stored, shapes = minicpm()
    path = write_safetensors(tmp_path / "m.safetensors", stored)
    rules = {name: rule for name, rule in QKV.items() if name != "k_proj"}
    model = empty(shapes)
    with pytest.raises(LoadError) as error:
        load(model, path, mapper=WeightsMapper(orig_to_new_stacked=rules, orig_to_new_prefix=PREFIXES))
    message = str(error.value)
    assert f"1 unexpected: {BLOCK}.k_proj.weight" in message
    assert "becomes vit_merger.self_attn.k_proj.weight by prefix rule 'model.vit_merger.' -> 'vit_merger.'" in message
    assert "qkqkv" not in message


class Gemma3Model(nn.Module):
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=DOTTED)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].self_attn = nn.Module()
        self.layers[0].self_attn.qkv_proj = nn.Linear(8, 12, bias=False)


class Gemma3ForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Gemma3Model()


@pytest.mark.parametrize(("cls", "prefix"), [(Gemma3Model, ""), (Gemma3ForCausalLM, "model.")])
def test_2_gemma3s_mapper_is_found_on_the_class_that_is_loaded_and_on_one_inside(tmp_path, cls, prefix):
    stored = {f"{prefix}layers.0.self_attn.{name}_proj.weight": part(number) for number, name in enumerate("qkv")}
    model = cls()
    load(model, write_safetensors(tmp_path / "m.safetensors", stored))
    fused = model.state_dict()[f"{prefix}layers.0.self_attn.qkv_proj.weight"]
    assert torch.equal(fused, torch.cat([part(0), part(1), part(2)]))


def test_2_jina_v5_merges_a_prefix_with_the_parents_stacked_rules(tmp_path):
    mapper = WeightsMapper(orig_to_new_stacked=DOTTED) | WeightsMapper(orig_to_new_prefix={"": "model."})
    stored = {f"layers.0.self_attn.{name}_proj.weight": part(number) for number, name in enumerate("qkv")}
    stored["lm_head.weight"] = part(9)
    path = write_safetensors(tmp_path / "m.safetensors", stored)
    model = Gemma3ForCausalLM()
    made = plan(model, path, mapper=mapper)
    assert made.unexpected_keys == ["lm_head.weight"]
    assert "becomes model.lm_head.weight by prefix rule '' -> 'model.'" in "\n".join(made.problems())
    load(model, path, mapper=mapper, ignore_unexpected=["lm_head.*"])
    assert torch.equal(model.model.layers[0].self_attn.qkv_proj.weight[4:8], part(1))


def test_2_coheres_two_mappers_both_count(tmp_path):
    first = WeightsMapper(orig_to_new_stacked=DOTTED)
    second = WeightsMapper(orig_to_new_substr={"_quantizer.": None}, orig_to_new_prefix={"lm_head": None})
    stored = {f"a.{name}_proj.weight": part(number) for number, name in enumerate("qkv")}
    stored |= {"a.q_proj.weight_quantizer._scale": part(7, 1), "lm_head.weight": part(8)}
    model = empty({"a.qkv_proj.weight": (12, 8)})
    report = load(model, write_safetensors(tmp_path / "m.safetensors", stored), mapper=first | second)
    assert torch.equal(model.a.qkv_proj.weight, torch.cat([part(0), part(1), part(2)]))
    assert report.dropped == {
        "a.q_proj.weight_quantizer._scale": "substr rule '_quantizer.' -> None",
        "lm_head.weight": "prefix rule 'lm_head' -> None",
    }


def test_4_gemma4_names_under_the_language_model(tmp_path):
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    )
    stored = {f"model.language_model.layers.{n}.mlp.weight": part(n) for n in range(3)} | {"lm_head.weight": part(9)}
    shapes = {f"language_model.model.layers.{n}.mlp.weight": (4, 8) for n in range(3)}
    model = empty(shapes | {"language_model.lm_head.weight": (4, 8)})
    report = load(model, write_safetensors(tmp_path / "m.safetensors", stored), mapper=mapper)
    assert report.ok
    assert torch.equal(model.state_dict()["language_model.model.layers.2.mlp.weight"], part(2))
    assert torch.equal(model.language_model.lm_head.weight, part(9))
    wrong = WeightsMapper(orig_to_new_prefix={"model.language_model": "language_model.model."})
    with pytest.raises(LoadError, match=r"becomes language_model.model..layers.0.mlp.weight by prefix rule") as error:
        load(model, write_safetensors(tmp_path / "n.safetensors", stored), mapper=wrong)
    assert len(error.value.report.missing_keys) == 4
