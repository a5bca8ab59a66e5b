"""Buffers that no checkpoint stores: what spoils them, that it is found, and that it is put right."""

import pytest
import torch
from torch import nn

from streamload import LoadError, audit_buffers, load, restore_buffers, skeleton
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


ALL = ["embed_scale", "inv_freq", "original_inv_freq", "pos_embed", "tables[0]", "tables[2]"]


def values(model):
    found = {name: getattr(model, name) for name in ("embed_scale", "inv_freq", "original_inv_freq", "pos_embed")}
    return found | {f"tables[{n}]": model.tables[n] for n in (0, 2)}


def test_a_skeleton_spoils_nothing():
    with skeleton():
        model = Resampler()
    assert audit_buffers(model, Resampler) == []


def test_what_the_meta_device_spoils_is_put_right():
    with torch.device("meta"):
        model = Resampler()
    found = restore_buffers(model, Resampler)
    assert sorted(each.name for each in found) == ALL
    assert {each.why for each in found} == {"on the meta device"}
    for name, value in values(Resampler()).items():
        assert torch.equal(values(model)[name], value), name
    assert "pos_embed" not in model.state_dict()


@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan")])
def test_a_position_cache_that_came_back_as_garbage(garbage):
    model = Resampler()
    cache = model.pos_embed
    cache.fill_(garbage)
    [found] = audit_buffers(model, Resampler)
    assert (found.name, found.kind) == ("pos_embed", "buffer")
    assert "values differ by up to" in found.why
    restore_buffers(model, Resampler)
    assert model.pos_embed is cache
    assert torch.equal(cache, Resampler().pos_embed)


def test_a_cast_model_is_not_spoiled_and_is_restored_in_its_dtype():
    model = Resampler().bfloat16()
    assert audit_buffers(model, Resampler) == []
    model.inv_freq.zero_()
    restore_buffers(model, Resampler)
    assert torch.equal(model.inv_freq, Resampler().inv_freq.bfloat16())


def test_nothing_to_restore_is_an_error():
    with pytest.raises(LoadError, match="nothing to restore in Resampler: all 6"):
        restore_buffers(Resampler(), Resampler)


def test_a_factory_of_something_else_is_an_error():
    with pytest.raises(LoadError, match=r"another structure.*proj"):
        audit_buffers(Resampler(), nn.Module)


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
    with pytest.raises(LoadError, match=r"1 tensor attributes of Clever are on the meta device.*: largest"):
        load(model, path)
    assert model.weight.is_meta
    with pytest.raises(LoadError, match=r"cannot be restored: largest \(computed from a parameter"):
        restore_buffers(model, Clever)
