"""The direct source: right bytes, buffers reused only when nobody holds them, nothing left behind."""

import gc
import os
import threading

import pytest
import torch

from streamload import BudgetError, Checkpoint, SourceError, guard, load
from streamload.sources.direct_stream import DirectSource
from streamload.testing import module_of, tensor_bytes, write_safetensors, write_sharded
from tests.cache import evict

MiB = 1 << 20


def big():
    """12 MiB in tensors of 1 MiB, and small ones between them."""
    tensors = {}
    for n in range(12):
        tensors[f"layers.{n}.weight"] = torch.full((256, 1024), float(n))
        tensors[f"layers.{n}.bias"] = torch.full((5,), n + 0.5)
    return tensors


def source_of(path, budget=8 * MiB, names=None, threads=2):
    checkpoint = Checkpoint.open(path)
    specs = [spec for name, spec in checkpoint.tensors.items() if names is None or name in names]
    return DirectSource(specs, checkpoint.stamps, budget, threads)


def left_over():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_all_tensors_in_file_order_through_buffers_smaller_than_the_checkpoint(tmp_path):
    tensors = big()
    names = list(tensors)
    shards = {f"{n}.safetensors": {name: tensors[name] for name in names[n::3]} for n in range(3)}
    folder = write_sharded(tmp_path / "m", shards)
    before = left_over()
    source = source_of(folder)
    assert list(source.names) == [name for shard in sorted(shards) for name in shards[shard]]
    seen = []
    for name, tensor in source:
        assert torch.equal(tensor, tensors[name]), name
        seen.append(name)
    assert seen == list(source.names)
    assert source.bytes_read >= sum(each.nbytes for each in tensors.values())
    assert source.closed
    assert left_over() == before


def test_only_the_names_that_are_asked_for_are_read(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", big())
    wanted = {"layers.3.bias", "layers.7.weight"}
    source = source_of(path, names=wanted)
    assert {name for name, _ in source} == wanted
    assert source.bytes_read <= 20 + MiB + 4 * 4096


def test_a_consumer_that_keeps_them_all_gets_them_right_or_an_error(tmp_path):
    tensors = big()
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    kept = dict(source_of(path, budget=64 * MiB))
    assert kept.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(kept[name], tensor), name
    source = source_of(path)
    with pytest.raises(BudgetError, match=r"no buffer is free .*: 'layers.0.weight' and others.*clone what you keep"):
        dict(source)
    assert source.closed


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t[1:3], lambda t: t.numpy(), lambda t: torch.nn.Parameter(t)])
def test_what_is_kept_stays_right_while_the_rest_passes(tmp_path, keep):
    tensors = big()
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    kept = {}
    source = source_of(path, budget=10 * MiB)
    for name, tensor in source:
        if name in ("layers.1.weight", "layers.4.bias"):
            kept[name] = keep(tensor)
            pinned = source.pinned_bytes
    assert pinned > 0
    for name, value in kept.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(keep(tensors[name]))), name


def test_every_dtype_and_shape_keeps_its_bits(tmp_path):
    counted = torch.arange(24, dtype=torch.uint8)
    tensors = {
        "F32": torch.randn(3, 5),
        "BF16": torch.randn(7).bfloat16(),
        "F8": counted.view(torch.float8_e4m3fn),
        "F4": counted.view(torch.float4_e2m1fn_x2).reshape(4, 6),
        "I64": torch.arange(3),
        "BOOL": torch.tensor([True, False, True]),
        "C64": torch.randn(2, dtype=torch.complex64),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    path = write_safetensors(tmp_path / "m.safetensors", tensors, pad=1)
    for name, tensor in source_of(path):
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape), name
        assert tensor_bytes(tensor) == tensor_bytes(tensors[name]), name


def test_views_that_torch_saved_come_as_views(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    torch.save({"whole": base, "turned": base.T, "column": base[:, 1]}, tmp_path / "m.pt")
    found = {name: tensor.clone() for name, tensor in source_of(tmp_path / "m.pt")}
    assert torch.equal(found["turned"], base.T)
    assert torch.equal(found["column"], base[:, 1])


def test_a_budget_that_cannot_lend_the_largest_is_refused_at_once(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"small": torch.ones(2), "large": torch.ones(4 * MiB)})
    with pytest.raises(
        BudgetError, match=r"the largest, 'large', has 16,777,216 bytes.* (\d\d,\d{3},\d{3}) bytes are needed"
    ):
        source_of(path, budget=8 * MiB)


def test_leaving_in_the_middle_leaves_nothing_behind(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", big())
    before = left_over()
    with source_of(path) as source:
        _, first = next(source)
    assert left_over() == before
    assert first.eq(0).all()
    with pytest.raises(SourceError, match="the source is closed"):
        next(source)
    abandoned = source_of(path)
    next(abandoned)
    assert left_over() != before
    del abandoned
    gc.collect()
    assert left_over() == before
    with pytest.raises(KeyboardInterrupt):
        for _, _ in source_of(path):
            raise KeyboardInterrupt
    gc.collect()
    assert left_over() == before


def test_a_file_that_was_cut_short_is_told(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", big())
    source = source_of(path)
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 2 * MiB)
    before = left_over()[0]
    with pytest.raises(SourceError, match=r"the file ends at byte|has been replaced or changed"):
        dict(source)
    assert source.closed
    assert left_over()[0] == before


def test_a_file_that_is_cut_short_while_it_is_read_is_told(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", big())
    source, before = source_of(path), left_over()
    _, first = next(source)
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 2 * MiB)
    with pytest.raises(SourceError, match=r"m.safetensors: the file ends at byte [\d,]+, but its header promises"):
        for _, _ in source:
            pass
    assert source.closed
    assert left_over() == before
    assert first.eq(0).all()


def test_loading_from_it_and_under_guard(tmp_path):
    tensors = big()
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    for wrap in (lambda source: source, lambda source: guard(source, poison=True)):
        model = module_of({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        report = load(model, wrap(source_of(path)))
        assert report.clones == 0
        for name, tensor in tensors.items():
            assert torch.equal(model.get_parameter(name), tensor), name


def test_closing_waits_for_the_readers_before_their_memory_goes(tmp_path):
    tensors = {f"t{n}": torch.full((2 * MiB,), float(n)) for n in range(8)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    for _ in range(20):
        evict(path)
        with source_of(path, budget=48 * MiB) as source:
            next(source)
