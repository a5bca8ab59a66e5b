"""Buffers that no checkpoint stores: what spoils them, that it is found, and that it is put right."""

import pytest
import torch
from torch import nn

from streamload import LoadError, audit_buffers, load, plan, restore_buffers, skeleton
from streamload.testing import write_safetensors


class Resampler(nn.Module):
    """A position cache made without torch, as MiniCPM-V 2.6 has it, and the other kinds beside it."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        angles = torch.arange(12.0).reshape(3, 4)
        self.register_buffer("pos_embed", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)
        self.register_buffer("inv_freq", 1.0 / 10_000 ** (torch.arange(4.0) / 4), persistent=False)
        self.register_buffer("embed_scale", torch.tensor(5.65), persistent=False)
        self.original_inv_freq = self.inv_freq.clone()
        self.tables = [torch.arange(3), {"deep": torch.ones(2)}, torch.full((2,), 7.0)]
        self.masks = (torch.zeros(2), (torch.full((3,), 8.0), "causal"))


def values(model):
    found = {name: getattr(model, name) for name in ("embed_scale", "inv_freq", "original_inv_freq", "pos_embed")}
    found |= {f"tables[{n}]": model.tables[n] for n in (0, 2)} | {"tables[1]['deep']": model.tables[1]["deep"]}
    return found | {"masks[0]": model.masks[0], "masks[1][0]": model.masks[1][0]}


def test_a_skeleton_spoils_nothing():
    with skeleton():
        model = Resampler()
    assert audit_buffers(model, Resampler) == []


def test_what_the_meta_device_spoils_is_put_right():
    with torch.device("meta"):
        model = Resampler()
    found = restore_buffers(model, Resampler)
    assert sorted(each.name for each in found) == sorted(values(model))
    assert {each.why for each in found} == {"on the meta device"}
    for name, value in values(Resampler()).items():
        assert torch.equal(values(model)[name], value), name
    assert "pos_embed" not in model.state_dict()


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (0.0, "values differ by up to 1"),
        (1e30, "values differ by up to 1e+30"),
        (float("nan"), "24 of 24 values are NaN"),
    ],
)
def test_a_position_cache_that_came_back_as_garbage(garbage, why):
    model = Resampler()
    cache = model.pos_embed
    cache.fill_(garbage)
    [found] = audit_buffers(model, Resampler)
    assert (found.name, found.kind) == ("pos_embed", "buffer")
    assert found.why == why
    restore_buffers(model, Resampler)
    assert model.pos_embed is cache
    assert torch.equal(cache, Resampler().pos_embed)


def test_a_cast_model_is_not_spoiled_and_is_restored_in_its_dtype():
    model = Resampler().bfloat16()
    assert audit_buffers(model, Resampler) == []
    model.inv_freq.zero_()
    restore_buffers(model, Resampler)
    assert torch.equal(model.inv_freq, Resampler().inv_freq.bfloat16())


def test_tables_that_a_cast_has_rounded_get_their_dtype_back_on_demand():
    model = Resampler().half()
    with pytest.raises(LoadError, match="in the dtypes that they have here; exact_dtype=True undoes casts"):
        restore_buffers(model, Resampler)
    found = restore_buffers(model, Resampler, exact_dtype=True)
    rounded = ["embed_scale", "inv_freq", "pos_embed"]  # Module.half does not see attributes
    assert sorted((each.name, each.why) for each in found) == [
        (name, "torch.float16, a fresh one has torch.float32") for name in rounded
    ]
    for name, value in values(Resampler()).items():
        assert torch.equal(values(model)[name], value), name
        assert values(model)[name].dtype == value.dtype, name
    assert model.proj.weight.dtype == torch.float16


def test_nothing_to_restore_is_an_error():
    with pytest.raises(LoadError, match="nothing to restore in Resampler: all 9"):
        restore_buffers(Resampler(), Resampler)


def test_a_factory_of_something_else_is_an_error():
    with pytest.raises(LoadError, match=r"another structure.*proj"):
        audit_buffers(Resampler(), nn.Module)
    with pytest.raises(LoadError, match=r"1 parameters differ, such as weight \[4, 4\], a fresh one has \[4, 5\]"):
        audit_buffers(nn.Linear(4, 4), lambda: nn.Linear(5, 4))
    with pytest.raises(LoadError, match=r"expected a function that builds the model anew.*found Resampler"):
        audit_buffers(Resampler(), Resampler())


def test_an_attribute_on_meta_that_a_fresh_model_lacks_cannot_be_restored():
    model = Resampler()
    model.cache = torch.empty(2, device="meta")
    [found] = audit_buffers(model, Resampler)
    assert str(found) == "attribute cache: on the meta device, and a fresh model does not have it"
    with pytest.raises(LoadError, match="cannot be restored: cache"):
        restore_buffers(model, Resampler)


def test_shared_buffers_stay_shared():
    def build():
        pair = nn.Sequential(Resampler(), Resampler())
        pair[1].inv_freq = pair[0].inv_freq
        return pair

    model = build()
    with torch.device("meta"):
        model[0].inv_freq = model[1].inv_freq = torch.empty(4)
    restore_buffers(model, build)
    assert model[0].inv_freq is model[1].inv_freq
    assert torch.equal(model[0].inv_freq, Resampler().inv_freq)


class Clever(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.largest = self.weight.detach().max()


def test_an_attribute_computed_from_a_parameter_is_told_before_loading(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"weight": torch.arange(4.0)})
    with skeleton():
        model = Clever()
    with pytest.raises(
        LoadError,
        match=r"does not fit Clever \(1 on meta\); nothing was read\n  1 on meta: largest: .*computed after loading",
    ):
        load(model, path)
    assert model.weight.is_meta
    assert plan(model, path).stranded == ["largest"]
    report = load(model, path, strict=False)
    assert report.stranded == ["largest"]
    assert not report.ok
    with pytest.raises(LoadError, match=r"cannot be restored: largest \(computed from a parameter"):
        restore_buffers(model, Clever)


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        self.a.register_buffer("table", torch.ones(2), persistent=False)
        self.b.register_buffer("table", torch.full((2,), 2.0), persistent=False)


@pytest.mark.parametrize("kept", ["a", "b"])
def test_one_tensor_in_two_places_that_a_fresh_model_has_apart(kept):
    model = Twins()
    model.a.table = model.b.table = getattr(model, kept).table
    restore_buffers(model, Twins)
    assert audit_buffers(model, Twins) == []
    assert (model.a.table.tolist(), model.b.table.tolist()) == ([1, 1], [2, 2])


class Odd(nn.Module):
    """Tensors that cannot be looked at byte by byte, or not written in place."""

    def __init__(self):
        super().__init__()
        self.quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        self.sparse = torch.ones(2).to_sparse()
        self.conjugate = torch.tensor([1 + 2j]).conj()
        self.small = torch.ones(4).to(torch.float8_e4m3fn)
        self.packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        self.register_buffer("wide", torch.ones(1).expand(4), persistent=False)


def test_odd_tensors_are_compared_or_left_alone():
    model = Odd()
    assert audit_buffers(model, Odd) == []
    model.wide = torch.zeros(1).expand(4)
    model.conjugate = torch.tensor([1 + 3j]).conj()
    model.small = torch.zeros(4).to(torch.float8_e4m3fn)
    model.packed.view(torch.uint8).fill_(9)
    found = {each.name: each.why for each in restore_buffers(model, Odd)}
    assert found == {
        "wide": "values differ by up to 1",
        "conjugate": "values differ by up to 1",
        "small": "values differ by up to 1",
        "packed": "values differ",
    }
    assert audit_buffers(model, Odd) == []
