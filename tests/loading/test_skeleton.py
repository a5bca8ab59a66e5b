"""skeleton(): parameters on meta, everything else real, and a load fills it."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from streamload import load, skeleton
from streamload.memory import resident
from streamload.testing import write_safetensors

MiB = 1024 * 1024


class Block(nn.Module):
    """One of everything that a module can hold."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 3.0), requires_grad=False)
        self.listed = nn.ParameterList([torch.full((2,), 5.0), torch.full((2,), 6.0)])
        self.register_buffer("kept", torch.full((2,), 7.0))
        self.register_buffer("inv_freq", 1.0 / 10 ** torch.arange(0, width, 2), persistent=False)
        self.register_buffer("table", torch.from_numpy(np.arange(6.0).reshape(2, 3)), persistent=False)
        self.register_buffer("nothing", None)
        self.plain = torch.arange(3.0)
        self.number = torch.linspace(0, 1, 5).sum().item()  # needs real values while the module is built

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.plain.sum() + self.inv_freq.sum()


def is_real(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def load_from(model: nn.Module, folder: Path, tensors: dict[str, Tensor], **options: Any):
    return load(model, write_safetensors(folder / "model.safetensors", tensors), **options)


def test_parameters_on_meta_everything_else_real():
    with skeleton():
        block = Block()
    assert {name for name, _ in block.named_parameters()} == {
        "linear.weight",
        "linear.bias",
        "scale",
        "listed.0",
        "listed.1",
    }
    assert all(parameter.is_meta for parameter in block.parameters())
    assert [tuple(parameter.shape) for parameter in block.parameters()] == [(4,), (4, 4), (4,), (2,), (2,)]
    plain = Block()
    assert {name: tensor.tolist() for name, tensor in block.named_buffers()} == {
        name: tensor.tolist() for name, tensor in plain.named_buffers()
    }
    assert block.kept.tolist() == [7, 7]
    assert block.table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(block.inv_freq, torch.tensor([1.0, 0.01]))
    assert block.plain.tolist() == [0, 1, 2]
    assert block.number == 2.5
    assert block.nothing is None
    assert list(block.state_dict()) == list(plain.state_dict())  # in the same order, "inv_freq" and "table" left out


def test_no_memory_is_taken():
    nn.Linear(8, 8)  # warm up
    before = resident().anon
    with skeleton():
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))
        after = resident().anon
    assert sum(parameter.nbytes for parameter in model.parameters()) == 1024 * MiB
    assert after - before < 50 * MiB


def test_outside_nothing_changes():
    register = nn.Module.register_parameter
    with skeleton():
        assert nn.Module.register_parameter is register
    assert not torch_modules._global_parameter_registration_hooks
    assert is_real(nn.Linear(2, 2).weight)


def test_ends_with_an_exception():
    with pytest.raises(ZeroDivisionError), skeleton():
        assert nn.Linear(2, 2).weight.is_meta
        1 / 0  # noqa: B018
    assert not torch_modules._global_parameter_registration_hooks
    assert is_real(nn.Linear(2, 2).weight)


def test_nested():
    with skeleton():
        with skeleton():
            inner = Block()
        outer = Block()
        outer.scale = inner.scale  # on meta already
    assert outer.scale is inner.scale
    assert all(parameter.is_meta for parameter in [*inner.parameters(), *outer.parameters()])
    assert is_real(nn.Linear(2, 2).weight)


def test_a_skeleton_inside_does_not_break_a_tie_of_the_outer_one():
    with skeleton():
        first, second = nn.Module(), nn.Module()
        shared = nn.Parameter(torch.ones(2))
        first.w = shared
        with skeleton():
            second.w = shared
    assert first.w is second.w


def test_other_threads_build_as_usual():
    built: list[nn.Module] = []
    with skeleton():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert is_real(built[0].weight)


def test_two_threads_whose_skeletons_overlap():
    # One is entered first and left first, so that neither is inside the other.
    entered, left = threading.Event(), threading.Event()
    results: dict[str, bool] = {}

    def second() -> None:
        with skeleton():
            entered.set()
            left.wait(30)
            results["inside"] = nn.Linear(2, 2).weight.is_meta
        results["after"] = is_real(nn.Linear(2, 2).weight)

    thread = threading.Thread(target=second)
    with skeleton():
        thread.start()
        assert entered.wait(30)
        assert nn.Linear(2, 2).weight.is_meta
    left.set()
    thread.join()
    assert results == {"inside": True, "after": True}
    assert is_real(nn.Linear(2, 2).weight)
    assert not torch_modules._global_parameter_registration_hooks


class TiedByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.full((2, 3), 1.0))
        self.first = shared
        self.second = shared  # the real one again


class TiedByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 3)
        self.head = nn.Linear(3, 2, bias=False)
        self.head.weight = self.embed.weight


class TiedByModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.second = self.first


@pytest.mark.parametrize(
    ("kind", "name", "alias"),
    [
        (TiedByName, "first", "second"),
        (TiedByAttribute, "embed.weight", "head.weight"),
        (TiedByModule, "first.weight", "second.weight"),
    ],
)
def test_ties_hold_before_and_after_a_load(kind: type[nn.Module], name: str, alias: str, tmp_path: Path):
    with skeleton():
        model = kind()
    assert model.get_parameter(name) is model.get_parameter(alias)
    assert [each for each, _ in model.named_parameters()] == [name]
    report = load_from(model, tmp_path, {name: torch.full((2, 3), 9.0)})
    assert model.get_parameter(name) is model.get_parameter(alias)
    assert model.get_parameter(alias).tolist() == [[9, 9, 9], [9, 9, 9]]
    assert report.tied == {alias: name}


def test_equal_parameters_are_not_tied():
    with skeleton():
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert first.weight is not second.weight
    assert first.weight is not first.bias


class Marked(nn.Parameter):
    """A parameter with a class of its own, as inference engines have them."""


def test_class_and_attributes_are_kept(tmp_path: Path):
    def loader(param: nn.Parameter, loaded: Tensor) -> None:
        param.data.copy_(loaded)

    with skeleton():
        module = nn.Module()
        weight = Marked(torch.ones(3), requires_grad=False)
        weight.input_dim = 1
        module.register_parameter("weight", weight)
        weight.weight_loader = loader  # vLLM sets some before and some after it registers
        module.weight.output_dim = 0
    kept = {"input_dim": 1, "weight_loader": loader, "output_dim": 0}
    assert type(module.weight) is Marked
    assert module.weight.is_meta
    assert module.weight.__dict__ == kept
    load_from(module, tmp_path, {"weight": torch.full((3,), 2.0)})
    assert type(module.weight) is Marked
    assert module.weight.__dict__ == kept
    assert module.weight.tolist() == [2, 2, 2]
    assert weight.tolist() == [1, 1, 1]  # the one that was registered was not touched


def test_dtype_stride_and_requires_grad_are_kept():
    with skeleton():
        module = nn.Module()
        module.turned = nn.Parameter(torch.ones(2, 3, dtype=torch.float16).t())
        module.whole = nn.Parameter(torch.arange(4), requires_grad=False)
        module.none = None
        module.register_parameter("empty", None)
    assert (module.turned.dtype, module.turned.shape, module.turned.stride()) == (torch.float16, (3, 2), (1, 3))
    assert module.turned.requires_grad
    assert module.turned.is_leaf
    assert module.whole.dtype == torch.int64
    assert not module.whole.requires_grad
    assert module.empty is None


def test_a_lazy_parameter_is_left_alone():
    with skeleton():
        lazy = nn.LazyLinear(3)
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert lazy(torch.ones(1, 2)).shape == (1, 3)


def test_copies_of_modules_stay_on_meta():
    with skeleton():
        stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        twin = copy.deepcopy(stack.layers[0])
    assert len(list(stack.parameters())) == 24
    assert all(parameter.is_meta for parameter in [*stack.parameters(), *twin.parameters()])


def test_load_fills_everything_and_keeps_requires_grad(tmp_path: Path):
    with skeleton():
        block = Block()
    plain = Block()
    stored = {
        name: torch.full_like(tensor, value) for value, (name, tensor) in enumerate(plain.state_dict().items(), 1)
    }
    report = load_from(block, tmp_path, stored)
    assert report.ok
    assert {name: tensor.unique().tolist() for name, tensor in block.state_dict().items()} == {
        name: [value] for value, name in enumerate(stored, 1)
    }
    assert report.bytes_wanted == sum(tensor.nbytes for tensor in stored.values())
    assert all(is_real(tensor) for tensor in [*block.parameters(), *block.buffers(), block.plain])
    assert {name for name, parameter in block.named_parameters() if not parameter.requires_grad} == {"scale"}
    plain.load_state_dict(stored)
    x = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(block(x), plain(x))
    block(x).sum().backward()
    assert block.linear.weight.grad is not None


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4, num_layers=2), lambda: nn.MultiheadAttention(4, 2)])
def test_modules_that_keep_lists_of_their_weights(make: Any, tmp_path: Path):
    plain = make()
    with skeleton():
        model = make()
    load_from(model, tmp_path, dict(plain.state_dict()))
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    inputs = (x[..., :3],) if isinstance(plain, nn.LSTM) else (x, x, x)
    with torch.inference_mode():
        assert torch.equal(model(*inputs)[0], plain(*inputs)[0])
