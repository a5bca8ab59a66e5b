"""transformers' own conversions as placements: published layouts load bit for bit as its own loader loads them."""

import json
import re
import subprocess
import sys
from random import Random

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter

from streamload import BudgetError, Checkpoint, LoadError, MappingError, WeightsMapper, load, plan
from streamload.integrations.transformers import build_model
from streamload.testing import RingSource, write_safetensors
from tests.integrations.architectures import Sizes, architectures

SMALL = Sizes()
TEXT, ENCODER, MODELS = SMALL.text, SMALL.encoder, architectures(SMALL)


def saved(cls, config, folder, dtype=None):
    """A model with values of its own in every parameter, saved as that library publishes it."""
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    model.to(dtype) if dtype else None
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded_bit_for_bit(tmp_path, name):
    cls, config = MODELS[name]
    original = saved(cls, config(), tmp_path).state_dict()
    model = build_model(Checkpoint.open(tmp_path))
    report = load(model, tmp_path)
    ours, theirs = model.state_dict(), cls.from_pretrained(tmp_path).state_dict()
    assert ours.keys() == original.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, original[key]), key
        assert torch.equal(value, theirs[key]), key
    assert report.clones == 0
    assert report.bytes_wanted == Checkpoint.open(tmp_path).nbytes


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral"])
def test_experts_go_straight_from_the_file_into_their_stack(tmp_path, name):
    cls, config = MODELS[name]
    saved(cls, config(), tmp_path)
    made = plan(build_model(Checkpoint.open(tmp_path)), tmp_path)
    assert any(".experts.10." in placement.spec.name for placement in made.placements)
    assert made.operations == []
    rows = [each for each in made.placements if each.target.endswith("layers.0.mlp.experts.gate_up_proj")]
    assert {each.target_region[0][0] for each in rows} == set(range(len(rows) // 2))
    for each in rows:  # not in the order of their spelling, in which 10 comes before 2
        assert f".experts.{each.target_region[0][0]}." in each.spec.name


@pytest.mark.parametrize(("stored", "loaded"), [("Llama", hf.LlamaModel), ("Gemma3 causal", hf.Gemma3TextModel)])
def test_a_base_model_from_a_checkpoint_with_a_head(tmp_path, stored, loaded):
    cls, config = MODELS[stored]
    original = saved(cls, config(), tmp_path)
    model = loaded(config())
    report = load(model, tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(value, original.model.state_dict()[key]), key
    assert "prefix 'model.' taken off" in "".join(report.notes)
    heads = {"lm_head.weight": "outside 'model.': a head, which the base model has not"} if stored == "Llama" else {}
    assert report.dropped == heads


def test_a_causal_model_from_a_base_checkpoint(tmp_path):
    config = hf.LlamaConfig(**TEXT, tie_word_embeddings=True)
    original = saved(hf.LlamaModel, config, tmp_path)
    model = hf.LlamaForCausalLM(config)
    report = load(model, tmp_path)
    assert torch.equal(model.model.norm.weight, original.norm.weight)
    assert report.prefix == "model."
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_cast_on_the_way_through_a_merge(tmp_path):
    cls, config = MODELS["Qwen3-MoE"]
    original = saved(cls, config(), tmp_path, torch.bfloat16).state_dict()
    model = cls(config())
    load(model, tmp_path)
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, original[key].float()), key


EXPERTS = "model.layers.1.mlp.experts"


def altered(folder, alter):
    """A saved Qwen3-MoE with 12 experts whose tensors were altered, and its model."""
    cls, config = MODELS["Qwen3-MoE"]
    saved(cls, config(), folder)
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return build_model(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("gone", "missing", "wanted"),
    [
        ([f"{EXPERTS}.3.down_proj.weight"], ["expert 3"], None),
        ([f"{EXPERTS}.11.down_proj.weight"], ["expert 11"], None),
        ([f"{EXPERTS}.5.up_proj.weight"], ["up_proj.weight of expert 5"], None),
        ([f"{EXPERTS}.{n}.{kind}_proj.weight" for n in (0,) for kind in ("gate", "up")], ["expert 0"], None),
        (
            [f"{EXPERTS}.{n}.up_proj.weight" for n in range(12)],
            [*[f"up_proj.weight of expert {n}" for n in range(5)], "... (12)"],
            [*[f"{EXPERTS}.{n}.up_proj.weight" for n in range(5)], "... (12)"],
        ),
    ],
)
def test_experts_that_are_missing_are_named(tmp_path, gone, missing, wanted):
    model = altered(tmp_path, lambda tensors: [tensors.pop(name) for name in gone])
    made = plan(model, tmp_path)
    [what] = made.incomplete
    target = f"{EXPERTS}.{'down_proj' if 'down' in gone[0] else 'gate_up_proj'}"
    assert (what.name, what.missing, what.wanted) == (target, missing, wanted or gone)
    assert made.missing_keys == [target]
    assert made.mismatched_keys == []
    with pytest.raises(LoadError, match=rf"(?s)1 missing.*{re.escape(what.wanted[0])}") as caught:
        load(model, tmp_path)
    assert caught.value.report.incomplete == [what]
    report = load(model, tmp_path, strict=False)
    assert report.missing_keys == [target]
    assert not model.lm_head.weight.is_meta
    assert model.get_parameter(target).is_meta


def test_an_expert_too_many_and_one_of_another_shape(tmp_path):
    def add(tensors):
        tensors[f"{EXPERTS}.12.down_proj.weight"] = tensors[f"{EXPERTS}.11.down_proj.weight"].clone()
        tensors[f"{EXPERTS}.2.up_proj.weight"] = torch.ones(5, 32)

    made = plan(altered(tmp_path, add), tmp_path)
    down, up = sorted(made.mismatched_keys)
    assert (down.expected, down.found) == ("12 experts", f"number 12 ({EXPERTS}.12.down_proj.weight)")
    assert up.name == f"{EXPERTS}.gate_up_proj"
    assert up.expected == "shape [16, 32], which 11 others like it have"
    assert up.found == f"{EXPERTS}.2.up_proj.weight of shape [5, 32]"
    assert made.missing_keys == []


class AddOne(ConversionOps):
    """Arithmetic, which cannot be a placement."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        [tensors] = input_dict.values()
        return {target_patterns[0]: tensors[0] + 1}

    @property
    def reverse_op(self):
        return AddOne()


class AddsOneConfig(hf.BertConfig):
    model_type = "adds_one"


class AddsOne(hf.BertModel):
    config_class = AddsOneConfig


@pytest.fixture
def adding():
    rule = WeightConverter("pooler.dense.stored", "pooler.dense.weight", operations=[AddOne()])
    register_checkpoint_conversion_mapping("AddsOne", [rule], overwrite=True)


def test_what_is_no_rectangle_is_computed_and_noted(tmp_path, adding):
    tensors = dict(hf.BertModel(AddsOneConfig(**ENCODER)).state_dict())
    stored = tensors.pop("pooler.dense.weight").clone()
    path = write_safetensors(tmp_path / "m.safetensors", tensors | {"pooler.dense.stored": stored})
    model = AddsOne(AddsOneConfig(**ENCODER))
    report = load(model, path)
    assert torch.equal(model.pooler.dense.weight, stored + 1)
    assert torch.equal(model.embeddings.word_embeddings.weight, tensors["embeddings.word_embeddings.weight"])
    assert any("pooler.dense.weight (AddOne of transformers): computed" in note for note in report.notes)
    assert report.bytes_wanted == Checkpoint.open(path).nbytes
    with pytest.raises(BudgetError, match=r"pooler.dense.weight .* give memory_limit at least"):
        load(model, path, memory_limit=1_120_000)


def test_a_computation_runs_in_the_dtype_of_its_parameter_and_tells_its_progress(tmp_path, adding):
    tensors = {name: value.bfloat16() for name, value in hf.BertModel(AddsOneConfig(**ENCODER)).state_dict().items()}
    stored = tensors.pop("pooler.dense.weight").clone()
    path = write_safetensors(tmp_path / "m.safetensors", tensors | {"pooler.dense.stored": stored})
    model = AddsOne(AddsOneConfig(**ENCODER))
    seen = []
    load(model, path, progress=seen.append)
    assert torch.equal(model.pooler.dense.weight, stored.float() + 1)
    assert not torch.equal(model.pooler.dense.weight, (stored + 1).float())
    assert seen[-1].tensor == "pooler.dense.stored"
    assert seen[-1].bytes_done == seen[-1].bytes_total == Checkpoint.open(path).nbytes
    assert seen[-1].tensors_done == seen[-1].tensors_total == len(tensors) + 1


class MakesTwo(AddOne):
    """Says one name on meta and another when it computes."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        [[tensor]] = input_dict.values()
        name = target_patterns[0] if tensor.is_meta else "pooler.dense.other"
        return {name: tensor + 1}


def test_a_computation_that_makes_something_else_is_an_error(tmp_path):
    rule = WeightConverter("pooler.dense.stored", "pooler.dense.weight", operations=[MakesTwo()])
    register_checkpoint_conversion_mapping("AddsOne", [rule], overwrite=True)
    tensors = dict(hf.BertModel(AddsOneConfig(**ENCODER)).state_dict())
    tensors["pooler.dense.stored"] = tensors.pop("pooler.dense.weight")
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    with pytest.raises(LoadError, match=r"expected to make .*pooler.dense.weight.*but it made .*pooler.dense.other"):
        load(AddsOne(AddsOneConfig(**ENCODER)), path)


def test_a_mapper_that_switches_the_conversions_off_is_told(tmp_path):
    model = altered(tmp_path, lambda tensors: None)
    with pytest.raises(LoadError, match="mapper= stands in for the conversions of checkpoints that transformers has"):
        load(model, tmp_path, mapper=WeightsMapper())


@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled"])
@pytest.mark.parametrize("name", MODELS)
def test_a_one_pass_stream_gives_the_same_bits(tmp_path, name, order):
    cls, config = MODELS[name]
    original = saved(cls, config(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    names = sorted(stored, reverse=order == "reversed")
    if order == "shuffled":
        Random(3).shuffle(names)
    model = build_model(Checkpoint.open(tmp_path))
    report = load(model, RingSource({each: stored[each] for each in names}))
    for key, value in model.state_dict().items():
        assert torch.equal(value, original.state_dict()[key]), key
    assert report.ok
    if order == "sorted":  # gate_proj of the first expert has to wait for the first up_proj, as the others do not
        assert report.clones == (TEXT["num_hidden_layers"] if name in ("Qwen3-MoE", "Mixtral") else 0)


def test_experts_that_a_stream_lacks_are_named(tmp_path):
    gone = [f"{EXPERTS}.5.up_proj.weight", f"{EXPERTS}.3.down_proj.weight"]
    model = altered(tmp_path, lambda tensors: [tensors.pop(name) for name in gone])
    stored = load_file(tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"2 missing.*what fits was written") as caught:
        load(model, RingSource(stored))
    assert [each.wanted for each in caught.value.report.incomplete] in ([[gone[1]], [gone[0]]], [[gone[0]], [gone[1]]])
    for name in caught.value.report.missing_keys:
        assert model.get_parameter(name).is_meta
    stored[f"{EXPERTS}.5.up_proj.weight"] = torch.ones(3, 32)
    with pytest.raises(
        LoadError, match=r"(?s)1 missing, 1 mismatched.*F32 \[16, 32\], as others like it have, found .*5.up_proj"
    ):
        load(build_model(Checkpoint.open(tmp_path)), RingSource(stored))


def test_what_is_no_rectangle_is_computed_from_a_stream(adding):
    tensors = dict(hf.BertModel(AddsOneConfig(**ENCODER)).state_dict())
    stored = tensors.pop("pooler.dense.weight").clone()
    model = AddsOne(AddsOneConfig(**ENCODER))
    report = load(model, RingSource({"pooler.dense.stored": stored} | tensors))
    assert torch.equal(model.pooler.dense.weight, stored + 1)
    assert torch.equal(model.embeddings.word_embeddings.weight, tensors["embeddings.word_embeddings.weight"])
    assert any("pooler.dense.weight (AddOne of transformers): computed" in note for note in report.notes)
    with pytest.raises(BudgetError, match=r"pooler.dense.weight .* give memory_limit at least"):
        load(model, {"pooler.dense.stored": stored}, memory_limit=10_000)


def test_a_base_model_from_a_stream_with_the_head_first(tmp_path):
    cls, config = MODELS["Llama"]
    original = saved(cls, config(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    names = sorted(stored, key=lambda name: (name != "lm_head.weight", name))
    model = build_model(Checkpoint.open(tmp_path), base=True)
    report = load(model, RingSource({name: stored[name] for name in names}))
    assert report.dropped == {"lm_head.weight": "outside 'model.': a head, which the base model has not"}
    assert (report.clones, report.ok) == (0, True)
    assert torch.equal(model.embed_tokens.weight, original.model.embed_tokens.weight)


class SplitsConfig(hf.BertConfig):
    model_type = "splits"


class Splits(hf.BertModel):
    """Its checkpoint holds query, key and value in one tensor."""

    config_class = SplitsConfig


@pytest.mark.parametrize("as_stream", [False, True])
def test_a_stored_tensor_that_is_split_over_several_parameters(tmp_path, as_stream):
    parts = ["query", "key", "value"]
    own = "attention.self"
    rule = WeightConverter(f"{own}.qkv", [f"{own}.{part}" for part in parts], operations=[Chunk(dim=0)])
    register_checkpoint_conversion_mapping("Splits", [rule], overwrite=True)
    torch.manual_seed(1)
    wanted = dict(hf.BertModel(SplitsConfig(**ENCODER)).state_dict())
    stored = {name: value for name, value in wanted.items() if not any(f"{own}.{part}" in name for part in parts)}
    for layer in range(ENCODER["num_hidden_layers"]):
        for leaf in ("weight", "bias"):
            name = f"encoder.layer.{layer}.{own}.{{}}.{leaf}"
            wanted[name.format("key")] += 1  # biases are all zero otherwise
            stored[name.format("qkv")] = torch.cat([wanted[name.format(part)] for part in parts])
    model = Splits(SplitsConfig(**ENCODER))
    report = load(model, RingSource(stored) if as_stream else write_safetensors(tmp_path / "m.safetensors", stored))
    assert (report.ok, report.clones) == (True, 0)
    for name, value in wanted.items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.slow
def test_merging_experts_with_a_cast_takes_no_more_than_was_forecast(tmp_path):
    sizes = {"width": 512, "layers": 6, "vocabulary": 4000, "experts": 32}

    cls, config = architectures(Sizes(**sizes))["Qwen3-MoE"]
    saved(cls, config(), tmp_path, torch.bfloat16)

    def measured(way):
        command = [sys.executable, "-m", "tests.integrations.measured", way, "Qwen3-MoE", str(tmp_path)]
        done = subprocess.run([*command, json.dumps(sizes)], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    ours, theirs = measured("streamload"), measured("from_pretrained")
    assert ours["sum"] == theirs["sum"]
    assert ours["params"] == theirs["params"] > 2 * 150 * 2**20
    assert ours["extra"] <= max(1.1 * ours["staging"], ours["staging"] + 4 * 2**20)
    assert ours["staging"] <= 64 * 2**20
    assert theirs["extra"] > ours["params"]  # what its converters hold, which is what this is about


class Sums(ConversionOps):
    """Arithmetic on several stored tensors."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return {target_patterns[0]: sum(each[0] for each in input_dict.values())}

    @property
    def reverse_op(self):
        return Sums()


@pytest.mark.parametrize("order", ["sorted", "reversed", "group first", "group last"])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_computation_of_several_tensors_of_a_stream(adding, order, wrapper):
    rule = WeightConverter(["pooler.dense.one", "pooler.dense.two"], "pooler.dense.weight", operations=[Sums()])
    register_checkpoint_conversion_mapping("AddsOne", [rule], overwrite=True)
    tensors = dict(hf.BertModel(AddsOneConfig(**ENCODER)).state_dict())
    whole = tensors.pop("pooler.dense.weight")
    tensors |= {"pooler.dense.one": whole - 1, "pooler.dense.two": torch.ones_like(whole)}
    keys = {"group first": lambda name: "one" not in name, "group last": lambda name: ("dense." in name, name)}
    names = sorted(tensors, key=keys.get(order), reverse=order == "reversed")
    model = AddsOne(AddsOneConfig(**ENCODER))
    report = load(model, RingSource({wrapper + name: tensors[name] for name in names}))
    assert report.ok
    assert torch.equal(model.pooler.dense.weight, (whole - 1) + 1)
    assert report.bytes_wanted == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_computation_of_however_many_tensors_runs_once(adding, wrapper):
    runs = []

    class Counted(ConversionOps):
        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            [tensors] = input_dict.values()
            runs.append([tensor.device.type for tensor in tensors])
            return {target_patterns[0]: sum(tensors)}

    rule = WeightConverter(["pooler.parts.*.weight"], "pooler.dense.weight", operations=[Counted()])
    register_checkpoint_conversion_mapping("AddsOne", [rule], overwrite=True)
    tensors = dict(hf.BertModel(AddsOneConfig(**ENCODER)).state_dict())
    whole = tensors.pop("pooler.dense.weight")
    parts = {f"pooler.parts.{number}.weight": torch.full_like(whole, number + 1.0) for number in range(3)}
    model = AddsOne(AddsOneConfig(**ENCODER))
    report = load(model, RingSource({wrapper + name: tensor for name, tensor in (parts | tensors).items()}))
    assert report.ok
    assert model.pooler.dense.weight.eq(6).all()
    assert [devices for devices in runs if "meta" not in devices][-1:] == [["cpu"] * 3]
    assert sum(devices == ["cpu"] * 3 for devices in runs) == 2  # once traced, once for the values
    assert report.bytes_wanted == sum(tensor.nbytes for tensor in (parts | tensors).values())


def test_what_else_is_held_counts_when_something_is_computed_from_a_stream(adding):
    rules = [
        WeightConverter([f"{where}.one", f"{where}.two"], f"{where}.weight", operations=[Sums()])
        for where in ("pooler.dense", "encoder.layer.0.output.dense")
    ]
    register_checkpoint_conversion_mapping("AddsOne", rules, overwrite=True)
    model = AddsOne(AddsOneConfig(**ENCODER))
    own = model.pooler.dense.weight.detach()
    other = model.encoder.layer[0].output.dense.weight.detach()
    waits = {"encoder.layer.0.output.dense.one": other.clone()}
    group = {f"pooler.dense.{name}": own.clone() for name in ("one", "two")}
    need = 8 * own.nbytes  # two sources, twice that in the dtype of the parameter, and its result twice
    assert load(model, group, memory_limit=need, strict=False).clones == 1
    load(model, waits | group, memory_limit=need + other.nbytes, strict=False)
    with pytest.raises(
        BudgetError, match=rf"leaves {need - 1:,}; give memory_limit at least {need + other.nbytes:,} bytes"
    ):
        load(model, waits | group, memory_limit=need + other.nbytes - 1, strict=False)


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_experts_first_of_another_dtype_and_beside_the_merged_form(tmp_path, wrapper):
    original = altered(tmp_path, lambda tensors: None)
    load(original, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    names = sorted(stored, key=lambda name: ("experts" not in name, name))
    odd = f"{EXPERTS}.5.gate_proj.weight"
    stored[odd] = stored[odd].half()
    model = build_model(Checkpoint.open(tmp_path))
    report = load(model, RingSource({wrapper + name: stored[name] for name in names}))
    assert report.ok
    assert {(cast.source, cast.target) for cast in report.casts} == {("F16", "F32")}
    merged = model.get_parameter(f"{EXPERTS}.gate_up_proj")
    assert torch.equal(merged[5, :16], stored[odd].float())
    assert torch.equal(merged[4], original.get_parameter(f"{EXPERTS}.gate_up_proj")[4])
    with pytest.raises(MappingError, match="both map to"):
        load(model, {f"{EXPERTS}.gate_up_proj": merged.detach().clone()} | stored)
