"""Modules and arguments that are odd, and states that an earlier load left: never a wrong byte, never a silent one."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading

import pytest
import torch
from torch import nn

from streamload import Checkpoint, LoadError, MappingError, load, partial_load, plan, skeleton
from streamload.errors import BudgetError
from streamload.memory import Meter
from streamload.testing import module_of, write_safetensors
from tests.cache import evict


def stored(tmp_path, **tensors: torch.Tensor) -> str:
    names = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return write_safetensors(tmp_path / "model.safetensors", names)


def bare(**attributes: torch.Tensor | nn.Module) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)
    return module


def test_a_file_that_was_replaced_since_it_was_opened(tmp_path):
    path = stored(tmp_path, a=torch.full([4], 1.0), b=torch.full([4], 2.0))
    checkpoint = Checkpoint.open(path)
    os.replace(write_safetensors(tmp_path / "new", {"b": torch.full([4], 3.0), "a": torch.full([4], 4.0)}), path)
    module = bare(a=torch.zeros(4), b=torch.zeros(4))
    with pytest.raises(LoadError, match="replaced or changed since its header was read"):
        load(module, checkpoint)
    assert module.a.tolist() == module.b.tolist() == [0.0] * 4


class TestSharedMemory:
    def test_two_that_overlap(self, tmp_path):
        big = torch.zeros(15)
        module = bare(a=big[:10], b=big[5:])
        path = stored(tmp_path, a=torch.full([10], 1.0), b=torch.full([10], 2.0))
        with pytest.raises(LoadError, match="a and b share memory but are not the same view of it"):
            load(module, path)
        assert not big.any()

    def test_a_transposed_view(self, tmp_path):
        w = torch.zeros(3, 3)
        with pytest.raises(LoadError, match="a and b share memory"):
            load(bare(a=w, b=w.t()), stored(tmp_path, a=torch.ones(3, 3), b=torch.ones(3, 3)))

    def test_neighbours_in_one_piece_of_memory_are_fine(self, tmp_path):
        big = torch.zeros(4, 6)
        module = bare(a=big[:, :2], b=big[:, 2:])
        load(module, stored(tmp_path, a=torch.full([4, 2], 1.0), b=torch.full([4, 4], 2.0)))
        assert big.tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0, 2.0]] * 4

    def test_a_view_that_overlaps_itself(self, tmp_path):
        with pytest.raises(LoadError, match="a has elements that share memory"):
            load(bare(a=torch.zeros(9).as_strided((3, 3), (1, 1))), stored(tmp_path, a=torch.ones(3, 3)))

    def test_a_tie_beside_another_view_is_still_a_tie(self, tmp_path):
        w = nn.Parameter(torch.zeros(3, 3))
        other = nn.Parameter(w.detach().t())
        module = bare(a=w, b=other, c=other)
        made = plan(module, stored(tmp_path, b=torch.ones(3, 3)), ignore_missing=["a"])
        assert made.missing_keys == []
        assert made.tied == {"c": "b"}

    @pytest.mark.parametrize("view", [torch.view_as_complex(torch.zeros(4, 2)).conj(), torch._neg_view(torch.zeros(4))])
    def test_a_view_that_changes_signs(self, tmp_path, view):
        with pytest.raises(LoadError, match="a is a view that negates or conjugates"):
            load(bare(a=view), stored(tmp_path, a=torch.ones(4, dtype=view.dtype)))


class TestTies:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
            (torch.tensor([1 + 2j], dtype=torch.complex128), torch.tensor([1 + 3j], dtype=torch.complex128)),
            (torch.tensor([2**53]), torch.tensor([2**53 + 1])),
            (torch.tensor([0.0]), torch.tensor([-0.0])),
        ],
    )
    def test_copies_are_compared_bit_for_bit(self, tmp_path, first, second):
        w = torch.zeros_like(first)
        with pytest.raises(LoadError, match="b and a are tied in the module but differ"):
            load(bare(a=w, b=w), stored(tmp_path, a=first, b=second))

    def test_a_difference_of_bits_alone_is_told_as_that(self, tmp_path):
        w = torch.zeros(1)
        with pytest.raises(LoadError, match=r"differ in the checkpoint \(in their bits\)"):
            load(bare(a=w, b=w), stored(tmp_path, a=torch.tensor([0.0]), b=torch.tensor([-0.0])))

    def test_not_a_number_equals_itself(self, tmp_path):
        w = torch.zeros(2, dtype=torch.complex128)
        nan = torch.full([2], complex("nan"), dtype=torch.complex128)
        report = load(bare(a=w, b=w), stored(tmp_path, a=nan, b=nan.clone()))
        assert any("equal values" in note for note in report.notes)

    def test_one_module_used_twice_cannot_be_untied(self, tmp_path):
        layer = nn.Linear(2, 2, bias=False)
        path = stored(tmp_path, a__weight=torch.ones(2, 2), b__weight=torch.zeros(2, 2))
        with pytest.raises(LoadError, match="one parameter of one module that is used twice"):
            load(bare(a=layer, b=layer), path, untie=True)

    def test_every_name_keeps_its_kind(self, tmp_path):
        w = torch.zeros(2)
        module = bare(a=nn.Parameter(w), b=nn.Parameter(w, requires_grad=False), c=w)
        load(module, stored(tmp_path, a=torch.ones(2)), dtype="float64")
        assert (module.a.requires_grad, module.b.requires_grad, type(module.c)) == (True, False, torch.Tensor)
        assert module.a.data_ptr() == module.b.data_ptr() == module.c.data_ptr()
        assert module.c.tolist() == [1.0, 1.0]
        assert module.c.dtype == torch.float64

    def test_a_first_name_that_does_not_fit_leaves_it_to_the_alias(self, tmp_path):
        w = torch.zeros(2)
        module = bare(a=w, b=w)
        report = load(module, stored(tmp_path, a=torch.ones(3), b=torch.full([2], 5.0)), strict=False)
        assert [each.name for each in report.mismatched_keys] == ["a"]
        assert module.a.tolist() == [5.0, 5.0]

    def test_a_cast_is_forecast_once(self, tmp_path):
        w = torch.zeros(1000, dtype=torch.bfloat16)
        half = torch.ones(1000, dtype=torch.bfloat16)
        path = stored(tmp_path, a=half, b=half.clone())
        assert plan(bare(a=w, b=w), path, dtype="float32").forecast.params_bytes == 4000


class TestMarks:
    TENSORS = {name: torch.full([1000, 300], float(number)) for number, name in enumerate("abcd")}  # noqa: RUF012

    def broken(self, tmp_path) -> tuple[nn.Module, str]:
        """A skeleton whose load was cancelled: all its parameters have memory now, not all have values."""
        path = stored(tmp_path, **self.TENSORS)
        with skeleton():
            module = module_of(dict(self.TENSORS))

        def cancel(progress):
            raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            load(module, path, progress=cancel)
        return module, path

    def test_it_stays_until_all_is_loaded(self, tmp_path):
        module, path = self.broken(tmp_path)
        half = write_safetensors(tmp_path / "half.safetensors", {name: self.TENSORS[name] for name in "ab"})
        load(module, half, ignore_missing=["c", "d"])
        assert partial_load(module)
        with pytest.raises(LoadError, match="only partly loaded"):
            module()
        load(module, path)
        assert partial_load(module) is None
        assert {name: value.unique().item() for name, value in module.state_dict().items()} == {
            "a": 0,
            "b": 1,
            "c": 2,
            "d": 3,
        }

    def test_loading_the_parent_takes_it_off_the_child(self, tmp_path):
        child, _ = self.broken(tmp_path)
        parent = bare(child=child)
        path = write_safetensors(tmp_path / "p.safetensors", {f"child.{n}": t for n, t in self.TENSORS.items()})
        load(parent, path)
        assert partial_load(child) is None
        assert child.c.unique().item() == 2

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
    def test_it_goes_with_copies(self, tmp_path, copied):
        module, path = self.broken(tmp_path)
        other = copied(module)
        with pytest.raises(LoadError, match="only partly loaded"):
            other()
        load(other, path)
        assert partial_load(other) is None
        assert partial_load(module)

    def test_a_start_that_fails_keeps_it(self, tmp_path, monkeypatch):
        module, path = self.broken(tmp_path)

        def refuse(_):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LoadError, match="can't start new thread"):
            load(module, path)
        assert partial_load(module)

    def test_a_module_that_was_not_touched_is_not_marked(self, tmp_path, monkeypatch):
        module = module_of({name: torch.zeros_like(tensor) for name, tensor in self.TENSORS.items()})

        def refuse(_):
            raise RuntimeError("can't start new thread")

        path = stored(tmp_path, **self.TENSORS)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LoadError, match="can't start new thread"):
            load(module, path)
        assert partial_load(module) is None

    def test_a_script_module_tells_what_really_happened(self, tmp_path):
        module = torch.jit.script(nn.Linear(2, 2))

        def cancel(progress):
            raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            load(module, stored(tmp_path, weight=torch.ones(2, 2), bias=torch.ones(2)), progress=cancel)
        assert "ValueError" in partial_load(module)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without one")
def test_a_device_that_is_not_there(tmp_path):
    module = bare(a=torch.zeros(2))
    with pytest.raises(LoadError, match="device 'cuda' cannot be used here"):
        load(module, stored(tmp_path, a=torch.ones(2)), device="cuda")
    assert partial_load(module) is None


def test_modules_that_contain_themselves(tmp_path):
    module = bare(a=torch.zeros(2), child=nn.Module())
    module.child.parent = module
    with pytest.raises(LoadError, match="the modules contain themselves"):
        load(module, stored(tmp_path, a=torch.ones(2)))


def test_inference_mode(tmp_path):
    path = stored(tmp_path, a=torch.full([3], 7.0))
    with torch.inference_mode():
        module = bare(a=nn.Parameter(torch.zeros(3), requires_grad=False))
        load(module, path, dtype="bfloat16")
        assert module.a.tolist() == [7.0] * 3


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mapper": lambda name: 5}, MappingError, "turns 'a' into 5"),
        ({"mapper": lambda name: [name]}, MappingError, "turns 'a' into"),
        ({"ignore_missing": None}, LoadError, "expected a list of names or globs, found NoneType"),
        ({"ignore_unexpected": [5]}, LoadError, "expected names or globs, found 5"),
        ({"memory_limit": "9" * 400 + "TB"}, BudgetError, "memory_limit='999"),
    ],
)
def test_arguments(tmp_path, options, error, match):
    with pytest.raises(error, match=match):
        load(bare(a=torch.zeros(2)), stored(tmp_path, a=torch.ones(2)), **options)


@pytest.mark.parametrize(
    "entry", [("F32", None), ("F32", 3), 5, ("F32",), torch.ones(2), ("F32", (-1,)), ("F32", ("x",)), ("F32", (1.5,))]
)
def test_tables(tmp_path, entry):
    with pytest.raises(LoadError, match=r"'a': expected \(dtype, shape\)"):
        plan({"a": entry}, stored(tmp_path, a=torch.ones(2)))


def test_any_number_of_threads_stays_within_the_forecast(tmp_path):
    path = stored(tmp_path, a=torch.ones(100))
    evict(path)
    made = plan(bare(a=torch.zeros(100)), path, threads=5000)
    assert made.threads <= 64


def test_a_meter_that_nobody_holds_ends():
    meter = Meter(interval=0.001)
    meter.__enter__()
    thread = meter._thread
    del meter
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
