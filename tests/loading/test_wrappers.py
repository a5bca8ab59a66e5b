"""Prefixes of wrappers come off when every name has them and none is at home with them."""

import pytest
import torch
from torch import nn

from streamload import LoadError, MappingError, WeightsMapper, load
from streamload.testing import module_of, write_safetensors

VALUES = {"a.weight": torch.full((2,), 1.0), "b.weight": torch.full((2,), 2.0)}


def empty(*names):
    return module_of({name: torch.full((2,), float("nan")) for name in names})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_taken_off_when_every_name_has_it(tmp_path, prefix):
    path = write_safetensors(tmp_path / "m.safetensors", {prefix + name: value for name, value in VALUES.items()})
    model = empty("a.weight", "b.weight")
    report = load(model, path)
    assert model.b.weight.tolist() == [2.0, 2.0]
    assert report.notes == [f"{prefix!r} taken off every name: it is the prefix of a wrapper, not of the module"]
    fused = empty("c.weight")
    fused.c.weight = nn.Parameter(torch.zeros(4))
    load(fused, path, mapper=WeightsMapper(orig_to_new_stacked={"a": ("c", 0), "b": ("c", 1)}))
    assert fused.c.weight.tolist() == [1.0, 1.0, 2.0, 2.0]


def test_a_name_that_is_at_home_is_no_wrapper(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {f"module.{name}": value for name, value in VALUES.items()})
    model = empty("module.a.weight", "module.b.weight")
    assert load(model, path).notes == []
    assert model.module.a.weight.tolist() == [1.0, 1.0]


def test_on_some_names_only_it_is_an_error(tmp_path):
    path = write_safetensors(
        tmp_path / "m.safetensors", {"module.a.weight": VALUES["a.weight"], "b.weight": VALUES["b.weight"]}
    )
    model = empty("a.weight", "b.weight")
    with pytest.raises(MappingError, match=r"1 of 2 names carry .*'module.a.weight'.*'b.weight'"):
        load(model, path)
    assert torch.isnan(model.a.weight).all()
    with pytest.raises(LoadError, match=r"1 unexpected: module.a.weight"):
        load(empty("b.weight"), path)
