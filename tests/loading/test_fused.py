"""Fused parameters: every part in its place, in every order, and loud where one is missing, doubled or of a wrong size."""

from itertools import permutations

import pytest
import torch
from torch import nn

from streamload import LoadError, MappingError, WeightsMapper, load, plan, skeleton
from streamload.sources.staging import FIXED_OVERHEAD
from streamload.testing import module_of, write_safetensors, write_sharded

QKV = {".q_proj": (".qkv_proj", "q"), ".k_proj": (".qkv_proj", "k"), ".v_proj": (".qkv_proj", "v")}
GATE_UP = {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}
MAPPER = WeightsMapper(orig_to_new_stacked=QKV | GATE_UP)


def rows(count, value, width=8, dtype=torch.float32):
    """``count`` rows that count up from ``value``."""
    return (torch.arange(count * width).reshape(count, width) + value * 1000).to(dtype)


def grouped_query():
    """8 rows of q, 4 of k and v, as TinyLM has."""
    return {"a.q_proj.weight": rows(8, 1), "a.k_proj.weight": rows(4, 2), "a.v_proj.weight": rows(4, 3)}


def empty(shapes, **kwargs):
    return module_of({name: torch.full(shape, float("nan"), **kwargs) for name, shape in shapes.items()})


@pytest.mark.parametrize("order", [*permutations(["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"])])
def test_q_k_and_v_in_every_order(tmp_path, order):
    parts = grouped_query()
    path = write_safetensors(tmp_path / "m.safetensors", {name: parts[name] for name in order})
    model = empty({"a.qkv_proj.weight": (16, 8)})
    report = load(model, path, mapper=MAPPER)
    assert torch.equal(model.a.qkv_proj.weight, torch.cat([*parts.values()]))
    assert report.bytes_wanted == 16 * 8 * 4
    assert report.clones == 0


def test_parts_in_different_shards_with_a_cast_and_a_wider_value_head(tmp_path):
    parts = {"q_proj.weight": rows(6, 1), "k_proj.weight": rows(2, 2), "v_proj.weight": rows(4, 3)}
    folder = write_sharded(
        tmp_path / "m", {f"{n}.safetensors": {f"a.{k}": v} for n, (k, v) in enumerate(parts.items())}
    )
    model = empty({"a.qkv_proj.weight": (12, 8)}, dtype=torch.bfloat16)
    report = load(model, folder, mapper=MAPPER)
    assert torch.equal(model.a.qkv_proj.weight, torch.cat([*parts.values()]).bfloat16())
    assert {cast.narrows for cast in report.casts} == {True}


def test_gate_up_with_biases_and_scales(tmp_path):
    tensors = {
        "m.gate_proj.weight": rows(12, 1),
        "m.up_proj.weight": rows(12, 2),
        "m.up_proj.bias": torch.arange(12.0) + 20,
        "m.gate_proj.bias": torch.arange(12.0),
        "m.gate_proj.weight_scale": torch.tensor(0.25),
        "m.up_proj.weight_scale": torch.tensor(0.5),
    }
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    model = empty({"m.gate_up_proj.weight": (24, 8), "m.gate_up_proj.bias": (24,), "m.gate_up_proj.weight_scale": (2,)})
    load(model, path, mapper=MAPPER)
    fused = model.m.gate_up_proj
    assert torch.equal(fused.weight, torch.cat([rows(12, 1), rows(12, 2)]))
    assert torch.equal(fused.bias, torch.cat([torch.arange(12.0), torch.arange(12.0) + 20]))
    assert fused.weight_scale.tolist() == [0.25, 0.5]


def test_four_parts_of_which_three_come_as_one_span(tmp_path):
    mapper = WeightsMapper(orig_to_new_stacked={"in_qkv": ("in_qkvz", (0, 1, 2)), "in_z": ("in_qkvz", 3)})
    for order in (["in_qkv", "in_z"], ["in_z", "in_qkv"]):
        parts = {"in_qkv": rows(10, 1), "in_z": rows(6, 2)}
        path = write_safetensors(tmp_path / "m.safetensors", {f"a.{name}.weight": parts[name] for name in order})
        model = empty({"a.in_qkvz.weight": (16, 8)})
        load(model, path, mapper=mapper)
        assert torch.equal(model.a.in_qkvz.weight, torch.cat([rows(10, 1), rows(6, 2)]))


def test_a_list_of_parts_gets_the_tensor_in_each(tmp_path):
    mapper = WeightsMapper(orig_to_new_stacked={"shared": ("both", [0, 1])})
    path = write_safetensors(tmp_path / "m.safetensors", {"shared.weight": rows(3, 1)})
    model = empty({"both.weight": (6, 8)})
    load(model, path, mapper=mapper)
    assert torch.equal(model.both.weight, torch.cat([rows(3, 1)] * 2))


def test_an_already_fused_tensor_goes_in_whole(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"a.qkv_proj.weight": rows(16, 5)})
    model = empty({"a.qkv_proj.weight": (16, 8)})
    load(model, path, mapper=MAPPER)
    assert torch.equal(model.a.qkv_proj.weight, rows(16, 5))


def test_experts_stacked_on_a_new_dimension(tmp_path):
    mapper = WeightsMapper(
        orig_to_new_stacked={
            "experts.*.w1": ("experts.w13", 0),
            "experts.*.w3": ("experts.w13", 1),
            "experts.*.w2": ("experts.w2", None),
        }
    )
    tensors = {}
    for expert in (1, 0, 2):
        tensors[f"experts.{expert}.w3"] = rows(4, 10 + expert)
        tensors[f"experts.{expert}.w1"] = rows(4, 20 + expert)
        tensors[f"experts.{expert}.w2"] = rows(8, 30 + expert, width=4)
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    model = empty({"experts.w13": (3, 8, 8), "experts.w2": (3, 8, 4)})
    load(model, path, mapper=mapper)
    for expert in range(3):
        assert torch.equal(model.experts.w13[expert], torch.cat([rows(4, 20 + expert), rows(4, 10 + expert)]))
        assert torch.equal(model.experts.w2[expert], rows(8, 30 + expert, width=4))
    del tensors["experts.1.w2"]
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    with pytest.raises(
        LoadError, match=r"experts.w2: part expert 0, expert 2 present, part expert 1 missing.*experts.1.w2"
    ):
        load(model, path, mapper=mapper)


def test_experts_that_do_not_fit_are_told(tmp_path):
    mapper = WeightsMapper(orig_to_new_stacked={"e.*.w": ("e.w", None)})
    path = write_safetensors(tmp_path / "m.safetensors", {f"e.{number}.w": rows(4, number) for number in range(3)})
    with pytest.raises(LoadError, match=r"e.w: expected 2 experts, found number 2 \(e.2.w\)"):
        load(empty({"e.w": (2, 4, 8)}), path, mapper=mapper)
    with pytest.raises(LoadError, match="found a parameter that is a single number"):
        load(empty({"e.w": ()}), path, mapper=mapper)
    path = write_safetensors(tmp_path / "m.safetensors", {"e.².w": rows(4, 1)})
    with pytest.raises(LoadError, match=r"1 unexpected: e.².w"):
        load(empty({"e.w": (2, 4, 8)}), path, mapper=mapper)


def test_a_fused_tensor_on_disk_is_spread_over_several_parameters(tmp_path):
    mapper = WeightsMapper(split={"qkv_proj": ("q_proj", "k_proj", "v_proj")})
    path = write_safetensors(
        tmp_path / "m.safetensors", {"a.qkv_proj.weight": rows(16, 1), "a.qkv_proj.bias": torch.arange(16.0)}
    )
    shapes = {"q": 8, "k": 4, "v": 4}
    model = empty(
        {f"a.{part}_proj.weight": (n, 8) for part, n in shapes.items()}
        | {f"a.{part}_proj.bias": (n,) for part, n in shapes.items()}
    )
    report = load(model, path, mapper=mapper)
    assert torch.equal(torch.cat([model.a.q_proj.weight, model.a.k_proj.weight, model.a.v_proj.weight]), rows(16, 1))
    assert torch.equal(torch.cat([model.a.q_proj.bias, model.a.k_proj.bias, model.a.v_proj.bias]), torch.arange(16.0))
    assert report.bytes_wanted == 16 * 8 * 4 + 16 * 4
    path = write_safetensors(
        tmp_path / "m.safetensors", {"a.qkv_proj.weight": rows(15, 1), "a.qkv_proj.bias": torch.arange(16.0)}
    )
    with pytest.raises(LoadError, match=r"expected shape \[16, 8\] to be spread over a.q_proj.weight.*found \[15, 8\]"):
        load(model, path, mapper=mapper)


def test_transposed_storage_also_into_a_part(tmp_path):
    stored = rows(8, 1, width=24)  # GPT-2's Conv1D: [in, out]
    path = write_safetensors(
        tmp_path / "m.safetensors", {"h.c_attn.weight": stored, "h.c_fc.weight": rows(8, 2, width=6)}
    )
    mapper = WeightsMapper(split={"c_attn": ("q", "k", "v")}, transposed=["*.c_attn.weight", "*.c_fc.weight"])
    model = empty({"h.q.weight": (8, 8), "h.k.weight": (8, 8), "h.v.weight": (8, 8), "h.c_fc.weight": (6, 8)})
    load(model, path, mapper=mapper)
    assert torch.equal(torch.cat([model.h.q.weight, model.h.k.weight, model.h.v.weight]), stored.T)
    assert torch.equal(model.h.c_fc.weight, rows(8, 2, width=6).T)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (
            ["a.v_proj.weight"],
            r"a.qkv_proj.weight: part q, k present, part v missing; would be filled by a.v_proj.weight",
        ),
        (
            ["a.q_proj.weight", "a.k_proj.weight"],
            r"part v present, part q, k missing; .* a.q_proj.weight, a.k_proj.weight",
        ),
        ([*grouped_query()], r"1 missing: a.qkv_proj.weight\n.*part q, k, v missing"),
    ],
)
def test_missing_parts_are_named_with_what_would_fill_them(tmp_path, gone, message):
    tensors = {name: tensor for name, tensor in grouped_query().items() if name not in gone} | {
        "a.o.weight": rows(1, 1)
    }
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    model = empty({"a.qkv_proj.weight": (16, 8), "a.o.weight": (1, 8)})
    with pytest.raises(LoadError, match=message) as error:
        load(model, path, mapper=MAPPER)
    assert error.value.report.missing_keys == ["a.qkv_proj.weight"]
    assert torch.isnan(model.a.qkv_proj.weight).all()


def test_missing_parts_are_spelled_as_the_checkpoint_spells_its_names(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"model.x.q_proj.weight": rows(8, 1)})
    mapper = WeightsMapper(orig_to_new_prefix={"model.x.": "a."}, orig_to_new_stacked=QKV)
    made = plan(empty({"a.qkv_proj.weight": (16, 8)}), path, mapper=mapper)
    assert made.incomplete[0].wanted == ["model.x.k_proj.weight", "model.x.v_proj.weight"]


def test_not_strict_loads_the_parts_whose_place_is_known(tmp_path):
    tensors = {name: tensor for name, tensor in grouped_query().items() if "k_proj" not in name}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    model = empty({"a.qkv_proj.weight": (16, 8)})
    missing, _ = load(model, path, mapper=MAPPER, strict=False)
    assert missing == ["a.qkv_proj.weight"]
    weight = model.a.qkv_proj.weight
    assert torch.equal(weight[:8], rows(8, 1))
    assert torch.equal(weight[12:], rows(4, 3))
    assert torch.isnan(weight[8:12]).all()


def test_a_part_of_a_wrong_size(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", grouped_query() | {"a.k_proj.weight": rows(8, 2)})
    model = empty({"a.qkv_proj.weight": (16, 8)})
    with pytest.raises(
        LoadError, match=r"expected 16 along dimension 0 for all parts, found 8 \(a.q_proj.weight\) \+ 8 \(a.k"
    ):
        load(model, path, mapper=MAPPER)


def test_sizes_that_the_module_tells_decide(tmp_path):
    tensors = grouped_query() | {"a.q_proj.weight": rows(4, 1), "a.k_proj.weight": rows(8, 2)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    model = empty({"a.qkv_proj.weight": (16, 8)})
    model.a.qkv_proj.output_sizes = [8, 4, 4]
    with pytest.raises(LoadError, match=r"expected 8 along dimension 0 for part 'q', found 4 \(a.q_proj.weight\)"):
        load(model, path, mapper=MAPPER)


def test_a_part_that_comes_twice(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", grouped_query() | {"b.k_proj.weight": rows(4, 9)})
    mapper = WeightsMapper(orig_to_new_prefix={"b.": "a."}, orig_to_new_stacked=QKV)
    with pytest.raises(
        MappingError, match=r"'a.k_proj.weight' and 'b.k_proj.weight' both map to part k of 'a.qkv_proj.weight'"
    ):
        load(empty({"a.qkv_proj.weight": (16, 8)}), path, mapper=mapper)


def test_parts_and_the_fused_tensor_together_are_refused(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", grouped_query() | {"a.qkv_proj.weight": rows(16, 9)})
    with pytest.raises(MappingError, match=r"both map to 'a.qkv_proj.weight'"):
        plan(empty({"a.qkv_proj.weight": (16, 8)}), path, mapper=MAPPER)


def test_forecast_counts_a_fused_parameter_once(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", grouped_query())
    with skeleton():
        model = nn.Module()
        model.a = nn.Module()
        model.a.qkv_proj = nn.Linear(8, 16, bias=False)
    made = plan(model, path, mapper=MAPPER)
    assert made.forecast.params_bytes == 16 * 8 * 4
    assert made.bytes_to_read == 16 * 8 * 4
    assert (
        made.forecast.staging_bytes == FIXED_OVERHEAD
    )  # the parts are in the page cache, and each is one run of bytes
    assert [placement.target_region[0] for placement in made.placements] == [(0, 8), (8, 12), (12, 16)]
    sideways = {f"a.{part}_proj.weight": torch.ones(16, size) for part, size in zip("qkv", (4, 2, 2), strict=True)}
    path = write_safetensors(tmp_path / "m.safetensors", sideways)
    assert plan(model, path, mapper=MAPPER).forecast.staging_bytes > FIXED_OVERHEAD


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_not_strict_keeps_what_is_real_and_leaves_on_meta_what_would_be_raw_memory(tmp_path, dtype):
    tensors = {name: tensor for name, tensor in grouped_query().items() if "k_proj" not in name}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    model = module_of({"a.qkv_proj.weight": torch.full((16, 8), 5.0)})
    load(model, path, mapper=MAPPER, strict=False, dtype=dtype)
    weight = model.a.qkv_proj.weight
    assert torch.equal(weight[:8], rows(8, 1).to(weight.dtype))
    assert (weight[8:12] == 5.0).all()
    bare = module_of({"a.qkv_proj.weight": torch.empty(16, 8, device="meta")})
    missing, _ = load(bare, path, mapper=MAPPER, strict=False)
    assert missing == ["a.qkv_proj.weight"]
    assert bare.a.qkv_proj.weight.is_meta


def test_a_part_that_may_be_missing_is_told_and_the_rest_is_kept_through_a_cast(tmp_path):
    tensors = {name: tensor for name, tensor in grouped_query().items() if "k_proj" not in name}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    model = module_of({"a.qkv_proj.weight": torch.full((16, 8), 5.0)})
    report = load(model, path, mapper=MAPPER, ignore_missing=["a.qkv_proj.*"], dtype="bfloat16")
    assert report.dropped == {"a.qkv_proj.weight": "ignore_missing 'a.qkv_proj.*'"}
    assert [each.missing for each in report.incomplete] == [["k"]]
    assert "a.qkv_proj.weight: only parts of it are written, part k keeps the values that it has" in report.notes
    assert torch.equal(model.a.qkv_proj.weight[12:], rows(4, 3).bfloat16())
    assert (model.a.qkv_proj.weight[8:12] == 5.0).all()


def test_progress_of_a_load_that_unties(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"a": rows(2, 1), "b": rows(2, 2)})
    model = nn.Module()
    model.a = model.b = nn.Parameter(torch.zeros(2, 8))
    seen = []
    load(model, path, untie=True, progress=seen.append)
    assert torch.equal(model.b, rows(2, 2))
    assert seen[-1].tensor == "b"
    assert seen[-1].bytes_done == seen[-1].bytes_total


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"q_proj": "q", "k_proj": "K", "v_proj": "v"}, "where one is 'q', 'k' or 'v', all have to be"),
        ({"q_proj": "Q", "k_proj": "K", "v_proj": "V"}, "where one is 'q', 'k' or 'v', all have to be"),
        ({"gate": 0, "up": "1"}, "either all of them are numbers or none is"),
        ({"gate": 0, "up": 2}, "numbers have to run from 0 to 1"),
    ],
)
def test_parts_whose_order_is_not_known_are_refused(tmp_path, parts, why):
    names = {f"a.{name}.weight": rows(2, number) for number, name in enumerate(parts)}
    path = write_safetensors(tmp_path / "m.safetensors", names)
    mapper = WeightsMapper(orig_to_new_stacked={name: ("fused", part) for name, part in parts.items()})
    model = empty({"a.fused.weight": (2 * len(parts), 8)})
    with pytest.raises(
        MappingError, match=r"fill 'a.fused.weight' with parts .* so their order is not known: "
    ) as caught:
        plan(model, path, mapper=mapper)
    assert why in str(caught.value)
    assert why in str(mapper.lint(module=model))


def test_parts_of_other_names_lie_in_the_order_of_their_rules(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"a.up": rows(2, 1), "a.gate": rows(2, 2)})
    mapper = WeightsMapper(orig_to_new_stacked={"gate": ("fused", "gate"), "up": ("fused", "up")})
    model = empty({"a.fused": (4, 8)})
    load(model, path, mapper=mapper)
    assert torch.equal(model.a.fused, torch.cat([rows(2, 2), rows(2, 1)]))


def test_a_bias_that_is_cut_otherwise_than_its_weight(tmp_path):
    lengths = {"weight": (8, 4, 4), "bias": (8, 2, 6)}
    parts = {
        f"a.{part}_proj.{leaf}": torch.ones([size, 3][: 1 + (leaf == "weight")])
        for leaf, sizes in lengths.items()
        for part, size in zip("qkv", sizes, strict=True)
    }
    path = write_safetensors(tmp_path / "m.safetensors", parts)
    model = empty({"a.qkv_proj.weight": (16, 3), "a.qkv_proj.bias": (16,)})
    with pytest.raises(LoadError) as caught:
        load(model, path, mapper=MAPPER)
    assert (
        "a.qkv_proj.bias: expected parts cut as those of a.qkv_proj.weight (q 8 + k 4 + v 4), found q 8 + k 2 + v 6"
        in str(caught.value)
    )


def test_an_expert_that_is_cut_otherwise_than_the_others(tmp_path):
    rules = {"experts.*.w1": ("experts.w13", 0), "experts.*.w3": ("experts.w13", 1)}
    lengths = {(0, "w1"): 2, (0, "w3"): 2, (1, "w1"): 1, (1, "w3"): 3}
    parts = {f"experts.{number}.{name}": torch.ones(size, 8) for (number, name), size in lengths.items()}
    path = write_safetensors(tmp_path / "m.safetensors", parts)
    model = empty({"experts.w13": (2, 4, 8)})
    made = plan(model, path, mapper=WeightsMapper(orig_to_new_stacked=rules))
    [wrong] = made.mismatched_keys
    assert wrong.expected == "parts cut as those of expert 0 (0 2 + 1 2)"
    assert wrong.found == "0 1 + 1 3 (experts.1.w1, experts.1.w3)"


def test_sizes_that_nobody_can_check_are_noted(tmp_path):
    def notes(*layers):
        parts = {
            f"layers.{number}.{name}_proj.weight": torch.ones(size, 8)
            for number, sizes in enumerate(layers)
            for name, size in zip(("gate", "up"), sizes, strict=True)
        }
        path = write_safetensors(tmp_path / "m.safetensors", parts)
        model = empty({f"layers.{number}.gate_up_proj.weight": (4, 8) for number in range(len(layers))})
        return plan(model, path, mapper=MAPPER).notes

    assert notes((2, 2), (2, 2)) == []
    assert notes((1, 3), (1, 3)) == [
        "layers.*.gate_up_proj.weight: cut into 0 1 + 1 3 as the checkpoint has it, with nothing in the module to check it by"
    ]
    assert notes((2, 2), (2, 2), (1, 3)) == [
        "layers.*.gate_up_proj.weight: its 4 rows are not cut alike in all layers: 0 2 + 1 2 in "
        "layers.0.gate_up_proj.weight and 1 more; 0 1 + 1 3 in layers.2.gate_up_proj.weight"
    ]


def test_a_misspelt_target_is_told(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", grouped_query())
    mapper = WeightsMapper(orig_to_new_stacked=QKV | {".k_proj": (".qkv_porj", "k")})
    model = empty({"a.qkv_proj.weight": (16, 8)})
    with pytest.raises(LoadError) as caught:
        load(model, path, mapper=mapper)
    why = "does not fire: the module has no 'a.qkv_porj.weight'"
    assert f"a.k_proj.weight: stacked rule '.k_proj' -> '.qkv_porj' part 'k' {why}" in str(caught.value)
    findings = [str(each) for each in mapper.lint(grouped_query(), model) if each.kind == "never-fires"]
    assert findings == [
        "never-fires: stacked '.k_proj' -> '.qkv_porj' part 'k': it changes none of the 3 names "
        "(the module has no 'a.qkv_porj.weight')"
    ]


def test_explain_and_lint_know_what_is_spread_and_what_is_transposed():
    mapper = WeightsMapper(split={"qkv": ["q", "k", "v"], "kv": ["k", "w"]}, transposed=["*.c_fc.weight", "nothing.*"])
    home = ["a.q.weight", "a.k.weight", "a.v.weight", "a.c_fc.weight"]
    names = ["a.qkv.weight", "a.kv.weight", "a.c_fc.weight"]
    spread, missed, turned = (str(mapper.explain(name, home)) for name in names)
    assert spread.splitlines()[-1] == "= spread over a.q.weight, a.k.weight, a.v.weight"
    assert missed.splitlines()[1:3] == ["  split 'kv' -> ('k', 'w'): the module has no 'a.w.weight'", "= a.kv.weight"]
    assert "NOT in the module" in missed
    assert turned.splitlines()[-1] == "= a.c_fc.weight, transposed (no rule fired)"
    assert "where the module has them" in str(mapper.explain("a.qkv.weight"))
    assert [each.kind for each in mapper.lint(names)] == ["never-fires"]
    assert [str(each)[:60] for each in mapper.lint(names, home)] == [
        "not-in-module: 'a.kv.weight' maps to 'a.kv.weight', which th",
        "never-fires: split 'kv' -> ('k', 'w'): it changes none of th",
        "never-fires: transposed 'nothing.*': it matches none of the ",
    ]


def test_all_rules_that_had_a_hand_in_it_are_named(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {f"model.{k}": v for k, v in grouped_query().items()})
    mapper = WeightsMapper(orig_to_new_stacked=QKV | {".k_proj": (".qkv_porj", "k")}, orig_to_new_prefix={"model.": ""})
    with pytest.raises(LoadError) as caught:
        load(empty({"a.qkv_proj.weight": (16, 8)}), path, mapper=mapper)
    assert (
        "model.a.k_proj.weight: becomes a.k_proj.weight by prefix rule 'model.' -> ''; stacked rule '.k_proj' -> '.qkv_porj' "
        "part 'k' does not fire: the module has no 'a.qkv_porj.weight', and the module has no such parameter"
        in str(caught.value)
    )


def test_sizes_of_a_module_that_are_not_one_for_each_part_are_noted(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", grouped_query())
    model = empty({"a.qkv_proj.weight": (16, 8)})
    model.a.qkv_proj.output_sizes = [8, 8]
    assert plan(model, path, mapper=MAPPER).notes == [
        "a.qkv_proj.weight: its module's output_sizes has 2 entries for 3 parts, so the sizes are those of the checkpoint"
    ]
