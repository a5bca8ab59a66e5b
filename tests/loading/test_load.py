"""load and plan: every byte in its place, and every name accounted for."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

from streamload import Checkpoint, LoadError, MappingError, load, partial_load, plan, skeleton
from streamload.errors import BudgetError
from streamload.testing import module_of, tensor_bytes, write_safetensors, write_sharded
from tests.cache import evict, warm


def constants(shapes: dict[str, tuple[int, ...]], dtype=torch.float32) -> dict[str, torch.Tensor]:
    """A constant of its own for every tensor, so that a swap or a lost byte shows."""
    return {name: torch.full(shape, number, dtype=dtype) for number, (name, shape) in enumerate(shapes.items(), 1)}


TINY = {
    "embed.weight": (16, 8),
    "layers.0.q.weight": (8, 8),
    "layers.0.norm.weight": (8,),
    "layers.1.q.weight": (8, 8),
    "layers.1.norm.weight": (8,),
    "head.weight": (16, 8),
    "scale": (),
}


def nan_module(tensors: dict[str, torch.Tensor], **kwargs) -> nn.Module:
    return module_of({name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}, **kwargs)


def assert_equal(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    found = module.state_dict()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert tensor_bytes(found[name]) == tensor_bytes(tensor), name


@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("state", ["warm", "cold"])
@pytest.mark.parametrize("meta", [True, False])
def test_every_order_and_layout(tmp_path, order, shards, state, meta):
    tensors = constants(TINY)
    names = sorted(tensors)
    if order != "sorted":
        random.Random(5).shuffle(names) if order == "shuffled" else names.reverse()
    files = {f"part-{n}.safetensors": {name: tensors[name] for name in names[n::shards]} for n in range(shards)}
    write_sharded(tmp_path, files)
    for name in files:
        (warm if state == "warm" else evict)(tmp_path / name)
    on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    module = module_of(on_meta) if meta else nan_module(tensors)
    report = load(module, tmp_path)
    assert_equal(module, tensors)
    missing, unexpected = report
    assert (missing, unexpected, report.clones) == ([], [], 0)
    assert report.bytes_wanted == sum(tensor.numel() * 4 for tensor in tensors.values())
    json.dumps(report.to_dict())


def test_plan_reads_nothing_and_changes_nothing(tmp_path):
    tensors = constants(TINY)
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    evict(path)
    module = module_of({name: tensor.to("meta") for name, tensor in tensors.items()})
    made = plan(module, path)
    assert made.bytes_to_read == made.forecast.params_bytes == 4 * (16 * 8 * 2 + 64 * 2 + 16 + 1)
    assert [placement.target for placement in made.placements] == list(tensors)
    assert made.forecast.peak_bytes == made.forecast.params_bytes + made.forecast.staging_bytes
    assert all(parameter.is_meta for parameter in module.parameters())
    json.dumps(made.to_dict())


def test_plan_against_a_table(tmp_path):
    tensors = constants(TINY)
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    table = {"embed.weight": (torch.float32, (16, 8)), "head.weight": ("bfloat16", [16, 8]), "extra": ("F32", (2,))}
    made = plan(table, path)
    assert made.missing_keys == ["extra"]
    assert len(made.unexpected_keys) == 5
    assert [(cast.name, cast.source, cast.target, cast.narrows) for cast in made.casts] == [
        ("head.weight", "F32", "BF16", True)
    ]
    assert made.forecast.params_bytes == 16 * 8 * 4 + 16 * 8 * 2


class TestStrictness:
    def test_misfits_are_refused_before_a_byte_is_read(self, tmp_path):
        tensors = constants(TINY)
        path = write_safetensors(tmp_path / "model.safetensors", tensors)
        module = nan_module({**tensors, "layers.2.q.weight": torch.zeros(8, 8), "layers.2.norm.weight": torch.zeros(8)})
        del module.head
        with pytest.raises(LoadError, match=r"2 missing, 1 unexpected\); nothing was read") as caught:
            load(module, path)
        assert "layers.2.* (2)" in str(caught.value)
        assert "head.weight" in str(caught.value)
        assert caught.value.report.missing_keys == ["layers.2.q.weight", "layers.2.norm.weight"]
        assert caught.value.report.unexpected_keys == ["head.weight"]
        assert module.embed.weight.isnan().all()
        assert partial_load(module) is None

    def test_lenient_loads_what_fits_and_reports_the_rest(self, tmp_path):
        tensors = constants(TINY)
        path = write_safetensors(tmp_path / "model.safetensors", tensors)
        module = nan_module({**tensors, "embed.weight": torch.zeros(15, 8), "new": torch.zeros(2)})
        report = load(module, path, strict=False)
        assert report.missing_keys == ["new"]
        assert [mismatch.name for mismatch in report.mismatched_keys] == ["embed.weight"]
        assert not report.ok
        assert module.embed.weight.isnan().all()
        assert module.head.weight.eq(6).all()

    def test_a_persistent_buffer_is_missed_too(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
        module = module_of({"w": torch.zeros(2), "stats": torch.zeros(4)}, buffers=["stats"])
        with pytest.raises(LoadError, match="1 missing: stats"):
            load(module, path)

    def test_ignored_names_are_listed_with_their_rule(self, tmp_path):
        tensors = constants(TINY)
        path = write_safetensors(tmp_path / "model.safetensors", tensors)
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.1")}
        module = nan_module({**kept, "new": torch.zeros(2)})
        report = load(module, path, ignore_unexpected=["layers.1.*", "never"], ignore_missing=["new"])
        assert report.dropped == {
            "layers.1.q.weight": "ignore_unexpected 'layers.1.*'",
            "layers.1.norm.weight": "ignore_unexpected 'layers.1.*'",
            "new": "ignore_missing 'new'",
        }
        assert report.notes == ["ignore_unexpected 'never' matched nothing"]

    def test_a_learned_bias_cannot_be_ignored_by_name(self, tmp_path):
        tensors = {"lm_head.weight": torch.ones(4, 2), "lm_head.bias": torch.ones(4)}
        path = write_safetensors(tmp_path / "model.safetensors", tensors)
        with pytest.raises(LoadError, match=r"ignore_unexpected names lm_head\.bias, which the module has"):
            load(nan_module(tensors), path, ignore_unexpected=["lm_head.bias"])
        # A glob that covers it does not drop it either: it has a home.
        module = nan_module(tensors)
        report = load(module, path, ignore_unexpected=["lm_head.*"])
        assert module.lm_head.bias.eq(1).all()
        assert report.dropped == {}

    def test_a_single_string_is_not_a_list_of_names(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
        with pytest.raises(LoadError, match="found a single string"):
            load(nan_module({"w": torch.ones(2)}), path, ignore_missing="w")

    def test_a_missing_parameter_on_meta_cannot_be_ignored(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
        module = module_of({"w": torch.zeros(2, device="meta"), "v": torch.zeros(2, device="meta")})
        with pytest.raises(LoadError, match="v is on the meta device, so it has no value that could be kept"):
            load(module, path, ignore_missing=["v"])
        assert plan(module, path, ignore_missing=["v"]).missing_keys == ["v"]

    def test_a_list_that_matches_nothing_is_told_in_the_error(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
        with pytest.raises(LoadError, match=r"1 missing: v\n  ignore_missing 'V' matched nothing"):
            load(nan_module({"w": torch.ones(2), "v": torch.ones(2)}), path, ignore_missing=["V"])

    def test_the_closest_spelling_is_shown(self, tmp_path):
        tensors = {f"model.model.layers.{n}.w": torch.ones(2) for n in range(3)}
        path = write_safetensors(tmp_path / "model.safetensors", tensors)
        module = nan_module({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
        with pytest.raises(LoadError, match=r"strip 'model\.'\? 3 names would then fit"):
            load(module, path)


class TestMapper:
    def test_a_callable_or_an_object_renames_and_drops(self, tmp_path):
        path = write_safetensors(
            tmp_path / "model.safetensors", {"old.a": torch.ones(2), "old.b": torch.full((2,), 2.0)}
        )

        class Mapper:
            def map_name(self, name: str) -> str | None:
                return None if name == "old.b" else name.replace("old", "new")

        for mapper in (Mapper(), Mapper().map_name):
            module = nan_module({"new.a": torch.ones(2)})
            report = load(module, path, mapper=mapper)
            assert module.new.a.eq(1).all()
            assert report.dropped == {"old.b": "mapper rule Mapper"}

    def test_two_names_in_one_place_are_refused(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2), "b": torch.ones(2)})
        with pytest.raises(MappingError, match="'a' and 'b' both map to 'w'"):
            load(nan_module({"w": torch.ones(2)}), path, mapper=lambda name: "w")


class TestShapesAndDtypes:
    @pytest.mark.parametrize("stored", [(8,), (1, 8), (4, 1), (1,), (), (8, 4)])
    def test_wrong_shapes_that_would_broadcast(self, tmp_path, stored):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(stored)})
        with pytest.raises(LoadError, match=rf"mismatched: w: expected shape \[4, 8\], found shape .*{path}"):
            load(nan_module({"w": torch.ones(4, 8)}), path)

    @pytest.mark.parametrize(("stored", "own"), [((), (1,)), ((1,), ())])
    def test_one_element_converts_between_scalar_and_vector(self, tmp_path, stored, own):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.full(stored, 7.0)})
        module = nan_module({"w": torch.ones(own)})
        report = load(module, path)
        assert module.w.item() == 7
        assert module.w.shape == own
        assert report.notes == [f"w: one element, stored as {list(stored)}, put into {list(own)}"]

    @pytest.mark.parametrize("stored", [(3,), (1, 1)])
    def test_nothing_else_becomes_a_scalar(self, tmp_path, stored):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(stored)})
        with pytest.raises(LoadError, match="mismatched: w"):
            load(nan_module({"w": torch.ones(())}), path)

    @pytest.mark.parametrize("meta", [True, False])
    @pytest.mark.parametrize(
        ("source", "target"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float64")]
    )
    def test_casts_are_exact_and_noted(self, tmp_path, meta, source, target):
        source, target = getattr(torch, source), getattr(torch, target)
        values = torch.randn(300, 7).to(source)
        path = write_safetensors(tmp_path / "model.safetensors", {"w": values, "b": values[0].clone()}, pad=3)
        empty = {"w": torch.empty(300, 7, dtype=target), "b": torch.empty(7, dtype=target)}
        module = module_of({name: tensor.to("meta") if meta else tensor for name, tensor in empty.items()})
        report = load(module, path)
        assert torch.equal(module.w, values.to(target))
        assert torch.equal(module.b, values[0].to(target))
        assert [cast.narrows for cast in report.casts] == [target == torch.bfloat16] * 2

    def test_dtype_changes_floats_and_leaves_integers(self, tmp_path):
        tensors = {"w": torch.randn(4, 4), "ids": torch.arange(4), "b": torch.randn(4).half()}
        path = write_safetensors(tmp_path / "model.safetensors", tensors)
        module = module_of({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        load(module, path, dtype="bfloat16")
        assert torch.equal(module.w, tensors["w"].bfloat16())
        assert torch.equal(module.b, tensors["b"].bfloat16())
        assert torch.equal(module.ids, tensors["ids"])

    @pytest.mark.parametrize(
        ("stored", "own"),
        [
            ("int8", "float32"),
            ("float32", "int8"),
            ("bool", "uint8"),
            ("complex64", "float32"),
            ("float8_e4m3fn", "float32"),
        ],
    )
    def test_nothing_but_floats_is_cast(self, tmp_path, stored, own):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(4).to(getattr(torch, stored))})
        module = module_of({"w": torch.zeros(4).to(getattr(torch, own))})
        with pytest.raises(LoadError, match="only plain floats are converted unasked"):
            load(module, path)

    def test_a_target_that_is_not_contiguous(self, tmp_path):
        values = torch.randn(30, 20)
        path = write_safetensors(tmp_path / "model.safetensors", {"w": values})
        module = module_of({"w": torch.zeros(20, 30).t()})
        load(module, path)
        assert torch.equal(module.w, values)
        assert module.w.stride() == (1, 30)

    def test_a_target_with_overlapping_memory_is_refused(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.randn(4, 8)})
        module = module_of({"w": torch.zeros(8).expand(4, 8)})
        with pytest.raises(LoadError, match="w has elements that share memory"):
            load(module, path)


class TestTies:
    VALUE = torch.arange(32.0).reshape(8, 4)

    def tied(self, meta: bool = False) -> nn.Module:
        module = module_of({"embed.weight": torch.full((8, 4), float("nan"), device="meta" if meta else "cpu")})
        module.add_module("head", nn.Module())
        module.head.weight = module.embed.weight
        return module

    @pytest.mark.parametrize("meta", [True, False])
    @pytest.mark.parametrize("stored", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
    @pytest.mark.parametrize("flip", [False, True])
    def test_one_write_and_the_tie_holds(self, tmp_path, meta, stored, flip):
        names = stored[::-1] if flip else stored
        path = write_safetensors(tmp_path / "model.safetensors", dict.fromkeys(names, self.VALUE))
        module = self.tied(meta)
        report = load(module, path)
        assert module.head.weight is module.embed.weight
        assert torch.equal(module.head.weight, self.VALUE)
        assert report.tied == {"head.weight": "embed.weight"}
        equal = ["head.weight: stored as well as embed.weight, with equal values; they stay tied"]
        assert report.notes == (equal if len(stored) == 2 else [])

    @pytest.mark.parametrize("flip", [False, True])
    @pytest.mark.parametrize("meta", [True, False])
    def test_different_copies_are_an_error(self, tmp_path, flip, meta):
        tensors = {"embed.weight": self.VALUE, "head.weight": self.VALUE + torch.eye(8, 4) * 0.25}
        names = list(tensors)[::-1] if flip else list(tensors)
        path = write_safetensors(tmp_path / "model.safetensors", {name: tensors[name] for name in names})
        module = self.tied(meta)
        with pytest.raises(LoadError, match=r"head\.weight and embed\.weight are tied.*differ.*by up to 0\.25"):
            load(module, path)
        assert partial_load(module)
        module = self.tied(meta)
        report = load(module, path, untie=True)
        assert torch.equal(module.embed.weight, tensors["embed.weight"])
        assert torch.equal(module.head.weight, tensors["head.weight"])
        assert report.tied == {}
        assert report.notes == ["head.weight: untied from embed.weight, since the checkpoint stores two values"]

    def test_untie_keeps_equal_copies_tied(self, tmp_path):
        path = write_safetensors(
            tmp_path / "model.safetensors", {"embed.weight": self.VALUE, "head.weight": self.VALUE}
        )
        module = self.tied()
        load(module, path, untie=True)
        assert module.head.weight is module.embed.weight

    def test_nan_in_both_copies_is_equal(self, tmp_path):
        value = self.VALUE.clone()
        value[3, 3] = float("nan")
        path = write_safetensors(tmp_path / "model.safetensors", {"embed.weight": value, "head.weight": value})
        load(module := self.tied(), path)
        assert tensor_bytes(module.embed.weight) == tensor_bytes(value)

    def test_copies_are_compared_after_the_cast(self, tmp_path):
        path = write_safetensors(
            tmp_path / "model.safetensors", {"embed.weight": self.VALUE.double(), "head.weight": self.VALUE.half()}
        )
        load(module := self.tied(), path)
        assert torch.equal(module.head.weight, self.VALUE)

    def test_a_tie_through_shared_memory_is_a_tie(self, tmp_path):
        memory = torch.zeros(8, 4)
        module = module_of({"a": memory, "b": memory.view(8, 4)})
        path = write_safetensors(tmp_path / "model.safetensors", {"b": self.VALUE})
        report = load(module, path)
        assert torch.equal(module.a, self.VALUE)
        assert report.tied == {"b": "a"}

    def test_neither_copy_stored_is_missing(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"x": self.VALUE})
        with pytest.raises(LoadError, match=r"1 missing: embed\.\*|1 missing: embed\.weight"):
            load(self.tied(), path, ignore_unexpected=["x"])

    def test_a_module_used_twice(self, tmp_path):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 8, bias=False)
                self.b = self.a

        with skeleton():
            module = Twice()
        path = write_safetensors(tmp_path / "model.safetensors", {"b.weight": self.VALUE})
        load(module, path)
        assert module.b is module.a
        assert torch.equal(module.a.weight, self.VALUE)


class TestBuffers:
    def test_a_recomputed_buffer_is_dropped_by_name_and_untouched(self, tmp_path):
        class Rotary(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.zeros(2))
                self.register_buffer("inv_freq", torch.tensor([1.0, 0.01]), persistent=False)

        path = write_safetensors(tmp_path / "model.safetensors", {"inv_freq": torch.zeros(2), "w": torch.ones(2)})
        with skeleton():
            module = Rotary()
        report = load(module, path)
        assert report.dropped == {"inv_freq": "recomputed buffer"}
        assert module.inv_freq.tolist() == torch.tensor([1.0, 0.01]).tolist()
        assert module.w.tolist() == [1, 1]
        with torch.device("meta"):
            spoiled = Rotary()
        with pytest.raises(
            LoadError, match=r"does not fit Rotary \(1 on meta\).*\n  1 on meta: inv_freq: .*skeleton\(\)"
        ):
            load(spoiled, path)
        assert spoiled.w.is_meta

    def test_persistent_buffers_are_loaded(self, tmp_path):
        source = nn.BatchNorm1d(3)
        source.running_mean.fill_(5)
        source.num_batches_tracked.fill_(9)
        path = write_safetensors(tmp_path / "model.safetensors", dict(source.state_dict()))
        with torch.device("meta"):
            module = nn.BatchNorm1d(3)
        load(module, path)
        assert module.running_mean.tolist() == [5, 5, 5]
        assert module.num_batches_tracked.item() == 9
        assert isinstance(module.weight, nn.Parameter)


class TestModules:
    def test_parameters_keep_what_they_are(self, tmp_path):
        class Marked(nn.Parameter):
            pass

        path = write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2), "b": torch.ones(2)})
        module = nn.Module()
        module.a = Marked(torch.zeros(2, device="meta"))
        module.a.hint = "kept"
        module.b = nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
        load(module, path)
        assert type(module.a) is Marked
        assert module.a.hint == "kept"
        assert (module.a.requires_grad, module.b.requires_grad) == (True, False)
        (module.a * 2).sum().backward()
        assert module.a.grad.tolist() == [2, 2]

    def test_an_empty_tensor_is_written_too(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"flag": torch.zeros(0, 4), "w": torch.ones(2)})
        module = module_of({"flag": torch.zeros(0, 4, device="meta"), "w": torch.zeros(2)})
        load(module, path)
        assert not module.flag.is_meta
        assert module.flag.shape == (0, 4)

    def test_a_lazy_module_is_refused(self, tmp_path):
        path = write_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(2, 2)})
        with pytest.raises(LoadError, match="weight is a lazy parameter"):
            load(nn.LazyLinear(2), path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"backend": "magic"}, "backend='magic': expected one of auto, direct"),
        ({"dtype": "float31"}, "dtype 'float31' is not known"),
        ({"threads": 0}, "threads=0"),
        ({"threads": "x"}, "threads='x'"),
        ({"dtype": 5}, "dtype 5 is not known"),
        ({"device": "meta"}, "device 'meta': holds no values"),
        ({"mapper": 3}, "mapper: expected a WeightsMapper, an object with map_name or a callable, found int"),
        ({"recorder": "x"}, "recorder"),
        ({"progress": True}, "progress: expected a callable"),
        ({"device": "gpu0"}, "device 'gpu0'"),
    ],
)
def test_wrong_arguments_are_told(tmp_path, wrong, message):
    path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    with pytest.raises((LoadError, MappingError), match=message):
        load(nan_module({"w": torch.ones(2)}), path, **wrong)


def test_wrong_model_and_weights_are_told(tmp_path):
    path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    with pytest.raises(LoadError, match=r"model: expected an nn\.Module"):
        load("model", path)
    with pytest.raises(LoadError, match=r"model: expected an nn\.Module to load into, found dict"):
        load({"w": ("F32", (2,))}, path)
    with pytest.raises(LoadError, match="weights: expected a path"):
        load(nan_module({"w": torch.ones(2)}), 5)


def test_too_small_a_budget_is_refused(tmp_path):
    path = write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    with pytest.raises(BudgetError, match="too small"):
        load(nan_module({"w": torch.ones(2)}), path, memory_limit="100KiB")


def test_half_of_the_tensors_is_half_of_the_bytes(tmp_path):
    tensors = {f"t{n}": torch.full((1000, 50), float(n)) for n in range(20)}
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    kept = {name: tensor for name, tensor in tensors.items() if int(name[1:]) % 2}
    for state in (warm, evict):
        state(path)
        module = nan_module(kept)
        report = load(module, Checkpoint.open(path), ignore_unexpected=["t*"])
        assert_equal(module, kept)
        assert report.bytes_wanted == 10 * 200_000
        assert report.bytes_wanted <= report.bytes_read <= report.bytes_wanted + 10 * 2 * 4096


def test_progress_counts_bytes_and_tensors(tmp_path):
    tensors = {f"t{n}": torch.full((1000, 50), float(n)) for n in range(100)}
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    states = []
    load(nan_module(tensors), path, progress=states.append, threads=1)
    assert len(states) == 3  # 20 MB in jobs of 8 MiB
    assert [state.bytes_done for state in states] == sorted(state.bytes_done for state in states)
    last = states[-1]
    assert (last.bytes_done, last.bytes_total, last.tensors_done, last.tensors_total) == (
        20_000_000,
        20_000_000,
        100,
        100,
    )
    assert (last.tensor, last.file) == ("t99", path)
