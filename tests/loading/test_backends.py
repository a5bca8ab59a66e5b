"""``load(..., backend=...)``: the same plan and the same books, whoever reads; pages that parameters share with the files."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from streamload import BudgetError, LoadError, load, plan, skeleton
from streamload.memory.meter import resident, trim
from streamload.sources.stream import BACKENDS
from streamload.testing import module_of, write_safetensors

MiB = 1 << 20
every_backend = pytest.mark.parametrize("backend", BACKENDS)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


@every_backend
@pytest.mark.parametrize("first", ["embed.weight", "head.weight"])
def test_tied_copies_are_compared_whoever_reads_and_whichever_comes_first(tmp_path, backend, first):
    value = torch.arange(32.0).view(8, 4)
    names = [first, "head.weight" if first == "embed.weight" else "embed.weight"]
    path = write_safetensors(tmp_path / "m.safetensors", dict.fromkeys(names, value))
    model = Tied()
    report = load(model, path, backend=backend)
    assert torch.equal(model.embed.weight, value)
    assert model.head.weight is model.embed.weight
    assert any("equal values; they stay tied" in note for note in report.notes)

    write_safetensors(tmp_path / "m.safetensors", {"embed.weight": value, "head.weight": value + 1})
    with pytest.raises(LoadError, match=r"are tied in the module but differ in the checkpoint \(by up to 1\)"):
        load(Tied(), path, backend=backend)
    parted = Tied()
    load(parted, path, backend=backend, untie=True)
    assert torch.equal(parted.embed.weight, value)
    assert torch.equal(parted.head.weight, value + 1)


@every_backend
def test_what_does_not_fit_is_refused_before_a_byte_is_read(tmp_path, backend):
    path = write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(4), "x": torch.ones(4)})
    model = module_of({"w": torch.zeros(4), "y": torch.zeros(4)})
    with pytest.raises(LoadError, match="1 missing, 1 unexpected") as caught:
        load(model, path, backend=backend)
    assert caught.value.report.bytes_read == 0
    assert model.w.tolist() == [0.0] * 4


@every_backend
def test_only_what_the_module_takes_is_read(tmp_path, backend):
    path = write_safetensors(tmp_path / "m.safetensors", {"other": torch.ones(MiB), "w": torch.full((4096,), 3.0)})
    model = module_of({"w": torch.zeros(4096)})
    report = load(model, path, backend=backend, ignore_unexpected=["other"])
    assert model.w.eq(3).all()
    assert report.bytes_wanted == 16_384
    assert report.bytes_read <= 16_384 + 8192
    assert report.clones == 0
    assert report.dropped == {"other": "ignore_unexpected 'other'"}


@pytest.mark.parametrize("backend", ["safetensors", "runai", "fastsafetensors"])
def test_whole_tensors_need_a_budget_for_the_largest(tmp_path, backend):
    path = write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(MiB)})
    model = module_of({"w": torch.zeros(MiB)})
    for call in (plan, load):
        with pytest.raises(BudgetError, match=r"backend='\w+' gives: the largest, 'w', has 4,194,304 bytes"):
            call(model, path, backend=backend, memory_limit="2MiB")
    assert plan(model, path, backend=backend, memory_limit="8MiB").forecast.staging_bytes == 5 * MiB


def test_parameters_share_the_pages_of_the_file(tmp_path):
    tensors = {f"layers.{n}.weight": torch.full((MiB,), float(n)) for n in range(16)}
    tensors["small"] = torch.full((8,), 1.5, dtype=torch.bfloat16)
    path = str(tmp_path / "m.safetensors")
    save_file(tensors, path)
    before = (tmp_path / "m.safetensors").read_bytes()[-4096:]
    with skeleton():
        model = module_of({name: torch.empty(each.shape, device="meta") for name, each in tensors.items()})
    made = plan(model, path, backend="mmap", share=True)
    assert made.forecast.params_bytes == 32  # only what has to be converted
    trim()
    start = resident()
    report = load(model, path, backend="mmap", share=True)
    assert resident().anon - start.anon < 4 * MiB  # of 64
    assert "16 parameters share the pages of the files" in report.notes
    assert all(model.get_parameter(name).eq(each.float()).all() for name, each in tensors.items())
    with torch.no_grad():
        model.layers.get_submodule("3").weight.mul_(2)
    assert model.layers.get_submodule("3").weight.eq(6).all()
    assert (tmp_path / "m.safetensors").read_bytes()[-4096:] == before
    again = module_of({name: torch.zeros(each.shape) for name, each in tensors.items()})
    load(again, path)
    assert again.layers.get_submodule("3").weight.eq(3).all()


def test_tied_parameters_share_pages_and_stay_tied(tmp_path):
    value = torch.arange(32.0).view(8, 4)
    path = write_safetensors(tmp_path / "m.safetensors", {"embed.weight": value})
    model = Tied()
    load(model, path, backend="mmap", share=True)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, value)


def test_sharing_is_for_mapped_files_only(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(4)})
    with pytest.raises(LoadError, match="so it needs backend='mmap', not 'auto'"):
        load(module_of({"w": torch.zeros(4)}), path, share=True)
    with pytest.raises(LoadError, match="backend='disk': expected one of auto, direct, mmap"):
        load(module_of({"w": torch.zeros(4)}), path, backend="disk")


@every_backend
def test_a_callback_that_raises_leaves_a_marked_module(tmp_path, backend):
    path = write_safetensors(tmp_path / "m.safetensors", {f"t{n}": torch.full((8,), float(n)) for n in range(6)})
    model = module_of({f"t{n}": torch.zeros(8) for n in range(6)})

    def stop(progress):
        if progress.tensors_done >= 3:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        load(model, path, backend=backend, progress=stop)
    with pytest.raises(LoadError, match="partly"):
        model(1)


@pytest.mark.parametrize("backend", ["mmap", "auto"])
def test_views_in_torch_files_find_their_places(tmp_path, backend):
    base = torch.arange(12.0).view(3, 4)
    torch.save({"turned": base.t(), "rows": base[1:]}, tmp_path / "pytorch_model.bin")
    model = module_of({"turned": torch.zeros(4, 3), "rows": torch.zeros(2, 4, dtype=torch.bfloat16)})
    load(model, tmp_path, backend=backend)
    assert torch.equal(model.turned, base.t())
    assert torch.equal(model.rows, base[1:].bfloat16())
