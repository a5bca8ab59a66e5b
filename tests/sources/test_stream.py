"""``stream``: every backend gives the right bytes, only those asked for, bounded, and leaves nothing behind."""

import gc
import os
import signal
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from streamload import BorrowError, BudgetError, Checkpoint, SourceError, guard, stream
from streamload.memory.meter import resident, trim
from streamload.sources.stream import BACKENDS
from streamload.testing import write_safetensors, write_sharded

MiB = 1 << 20
LENDING = ("runai", "fastsafetensors")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def tensors_of(count=40, size=65_536):
    """``count`` tensors of ``size`` floats, each with its own constant, and small ones between them."""
    made = {}
    for n in range(count):
        made[f"layers.{n}.weight"] = torch.full((size // 256, 256), n + 1.0)
        made[f"layers.{n}.bias"] = torch.full((3,), n + 0.5, dtype=torch.bfloat16)
    return made


def sharded(folder, tensors, shards=3):
    names = list(tensors)
    return write_sharded(
        folder, {f"model-{n}.safetensors": {name: tensors[name] for name in names[n::shards]} for n in range(shards)}
    )


def left_over():
    gc.collect()
    return threading.active_count(), sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in _open_descriptors())


def _open_descriptors():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


@every_backend
def test_every_tensor_once_with_its_value_and_dtype(tmp_path, backend):
    tensors = tensors_of()
    folder = sharded(tmp_path / "m", tensors)
    seen = {}
    source = stream(folder, backend=backend, memory_limit="4MiB")
    assert sorted(source.names) == sorted(tensors)
    assert source.lends == (backend in LENDING)
    assert source.bytes_read == 0
    for name, tensor in source:
        assert name not in seen
        assert tensor.dtype == tensors[name].dtype
        seen[name] = tensor.clone()
        del tensor
    assert seen.keys() == tensors.keys()
    assert all(torch.equal(seen[name], tensors[name]) for name in tensors)
    assert source.closed
    assert source.bytes_read >= sum(each.nbytes for each in tensors.values())
    assert list(source) == []


@every_backend
def test_only_what_is_asked_for_is_read(tmp_path, backend):
    tensors = tensors_of()
    folder = sharded(tmp_path / "m", tensors)
    wanted = {"layers.3.weight", "layers.17.bias", "layers.39.weight"}
    source = stream(folder, names=wanted, backend=backend)
    source.skip(["layers.17.bias"])
    assert {name: tensor[0].tolist()[:1] for name, tensor in source} == {
        "layers.3.weight": [4.0],
        "layers.39.weight": [40.0],
    }
    assert source.bytes_read <= 2 * 65_536 * 4 + 4 * 4096


def test_names_that_are_not_there_are_told(tmp_path):
    folder = sharded(tmp_path / "m", tensors_of(2))
    with pytest.raises(SourceError, match=r"has no tensor 'layers.0.wieght'; did you mean 'layers.0.weight'"):
        stream(folder, names=["layers.0.wieght"])
    with pytest.raises(SourceError, match="expected names of tensors, found a single string"):
        stream(folder, names="layers.0.weight")
    with pytest.raises(SourceError, match="backend='torch': expected one of auto, direct, mmap"):
        stream(folder, backend="torch")


@every_backend
def test_nothing_can_be_skipped_once_it_runs(tmp_path, backend):
    folder = sharded(tmp_path / "m", tensors_of(3))
    with stream(folder, backend=backend) as source:
        next(source)
        with pytest.raises(SourceError, match="only before the first one is asked for"):
            source.skip(["layers.0.bias"])


@every_backend
@pytest.mark.parametrize("how", ["close", "drop", "exception", "interrupt"])
def test_leaving_in_the_middle_leaves_nothing_behind(tmp_path, backend, how):
    folder = sharded(tmp_path / "m", tensors_of(12))
    with stream(folder, backend=backend, memory_limit="4MiB") as warm_up:  # libraries keep a thing or two for ever
        next(warm_up)
    before = left_over()

    def use(error):
        for number, _ in enumerate(stream(folder, backend=backend, memory_limit="4MiB")):
            if number == 5:
                raise error

    if how == "close":
        source = stream(folder, backend=backend, memory_limit="4MiB")
        next(source)
        source.close()
        with pytest.raises(SourceError, match="the source is closed"):
            next(source)
    elif how == "drop":
        source = stream(folder, backend=backend, memory_limit="4MiB")
        next(source)
        del source
    else:
        error = KeyboardInterrupt() if how == "interrupt" else ValueError("no")
        with pytest.raises(type(error)):
            use(error)
        error.__traceback__ = None
    assert left_over() == before


@pytest.mark.parametrize("backend", LENDING)
def test_65_tensors_kept_from_a_lending_library_are_told_by_the_first(tmp_path, backend):
    tensors = {f"t{n:02}": torch.full((4096,), n + 1.0) for n in range(65)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    first, kept = None, {}
    with pytest.raises(BorrowError) as caught:
        for name, tensor in stream(path, backend=backend, memory_limit=4 * 4096):
            first = first or name
            kept[name] = tensor
    assert f"'{first}' is still held" in str(caught.value)
    assert len(kept) <= 3


@pytest.mark.parametrize("backend", LENDING)
def test_65_tensors_copied_from_a_lending_library_are_right_also_when_poisoned(tmp_path, backend):
    tensors = {f"t{n:02}": torch.full((4096,), n + 1.0) for n in range(65)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    copied = {}
    for name, tensor in guard(stream(path, backend=backend, memory_limit=4 * 4096), poison=True):
        copied[name] = tensor.clone()
    assert copied.keys() == tensors.keys()
    assert all(copied[name].eq(tensors[name]).all() for name in tensors)


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each not in LENDING])
def test_a_dict_of_the_stream_is_right_or_a_budget_error(tmp_path, backend):
    tensors = tensors_of()
    folder = sharded(tmp_path / "m", tensors)
    try:
        kept = dict(stream(folder, backend=backend, memory_limit="4MiB"))
    except BudgetError as error:
        assert backend in ("auto", "direct")
        assert "are still held" in str(error)
        assert "'layers.0.weight'" in str(error)
        kept = dict(stream(folder, backend=backend, memory_limit="32MiB"))
    assert kept.keys() == tensors.keys()
    assert all(torch.equal(kept[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("backend", ["auto", "direct", "safetensors", "runai", "fastsafetensors"])
def test_a_budget_below_the_largest_tensor_is_refused(tmp_path, backend):
    path = write_safetensors(tmp_path / "m.safetensors", {"small": torch.ones(3), "large": torch.ones(MiB)})
    with pytest.raises(BudgetError, match=r"largest.*4,194,304 bytes"):
        stream(path, backend=backend, memory_limit="3MiB")
    assert sum(tensor.sum() for _, tensor in stream(path, backend=backend)) == MiB + 3


@every_backend
def test_a_copy_that_the_index_does_not_want_does_not_come(tmp_path, backend):
    folder = write_sharded(
        tmp_path / "m",
        {"a.safetensors": {"x": torch.ones(4), "y": torch.ones(4)}, "b.safetensors": {"x": torch.zeros(4) + 7}},
    )
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}')
    write_safetensors(tmp_path / "m" / "stray.safetensors", {"z": torch.ones(1)})
    assert {name: tensor.tolist() for name, tensor in stream(folder, backend=backend)} == {
        "x": [7.0] * 4,
        "y": [1.0] * 4,
    }


@every_backend
def test_empty_tensors_scalars_and_odd_offsets(tmp_path, backend):
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "odd": torch.arange(5, dtype=torch.int64),
    }
    path = write_safetensors(tmp_path / "m.safetensors", tensors, pad=3)
    found = {name: tensor.clone() for name, tensor in stream(path, backend=backend)}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


@every_backend
def test_a_checkpoint_without_tensors(tmp_path, backend):
    path = write_safetensors(tmp_path / "m.safetensors", {})
    assert list(stream(path, backend=backend)) == []


@pytest.mark.parametrize("backend", ["auto", "mmap"])
def test_torch_files_with_views(tmp_path, backend):
    base = torch.arange(12.0).view(3, 4)
    torch.save({"plain": base, "turned": base.t(), "row": base[1]}, tmp_path / "pytorch_model.bin")
    found = {name: tensor.clone() for name, tensor in stream(tmp_path, backend=backend)}
    assert torch.equal(found["plain"], base)
    assert torch.equal(found["turned"], base.t())
    assert torch.equal(found["row"], base[1])


@pytest.mark.parametrize("backend", ["safetensors", "safetensors-mmap", "runai", "fastsafetensors"])
def test_torch_files_are_not_for_libraries_of_safetensors(tmp_path, backend):
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"pytorch_model.bin: is no safetensors file"):
        stream(tmp_path, backend=backend)


@every_backend
def test_a_file_that_was_replaced_is_told(tmp_path, backend):
    path = write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(8)})
    checkpoint = Checkpoint.open(path)
    os.rename(write_safetensors(tmp_path / "other.safetensors", {"w": torch.zeros(8)}), path)
    with pytest.raises(SourceError, match=r"m.safetensors: has been replaced or changed"):
        list(stream(checkpoint, backend=backend))


def test_mapped_tensors_can_be_written_to_and_the_file_is_not(tmp_path):
    tensors = {f"t{n}": torch.full((MiB // 2,), float(n)) for n in range(12)}
    path = str(tmp_path / "m.safetensors")
    save_file(tensors, path)  # aligned: what is not is copied, not mapped
    before = (tmp_path / "m.safetensors").read_bytes()
    kept = {}
    for name, tensor in stream(path, backend="mmap"):
        tensor[::4096] += 100
        kept[name] = tensor
    for name, tensor in tensors.items():
        expected = tensor.clone()
        expected[::4096] += 100
        assert torch.equal(kept[name], expected), name
    assert (tmp_path / "m.safetensors").read_bytes() == before


def test_mapped_pages_are_let_go_behind_the_reader_even_if_all_tensors_are_kept(tmp_path):
    tensors = {f"t{n}": torch.full((MiB,), float(n)) for n in range(24)}
    path = str(tmp_path / "m.safetensors")
    save_file(tensors, path)
    del tensors
    kept, most, trimmed = {}, 0, trim()
    del trimmed
    start = resident()
    for name, tensor in stream(path, backend="mmap"):
        assert tensor.max() == float(name[1:])
        kept[name] = tensor
        most = max(most, resident().file - start.file)
    assert most < 20 * MiB  # of 96
    assert resident().file - start.file < 12 * MiB
    assert resident().anon - start.anon < 4 * MiB
    assert all(tensor.min() == float(name[1:]) for name, tensor in kept.items())


def drain(source):
    for _ in source:
        pass


@every_backend
def test_interrupts_at_any_moment_hang_nothing_and_leave_nothing(tmp_path, backend, monkeypatch):
    folder = sharded(tmp_path / "m", tensors_of(24))
    swallowed = []  # one that comes while a finalizer runs is printed by Python, and goes no further
    monkeypatch.setattr(sys, "unraisablehook", lambda told: swallowed.append(told.exc_type))
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stream(folder, backend=backend, memory_limit="4MiB") as warm_up:
            next(warm_up)
        before, broken = left_over(), 0
        for run in range(12):
            timer = threading.Timer(0.001 + 0.002 * run, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                drain(stream(folder, backend=backend, memory_limit="4MiB"))
                timer.join()
                time.sleep(0.2)
            except KeyboardInterrupt as error:
                broken += 1
                error.__traceback__ = None
            timer.join()
        assert broken + swallowed.count(KeyboardInterrupt) == 12
        assert broken >= 10
        assert left_over() == before
    finally:
        signal.signal(signal.SIGINT, earlier)


@every_backend
def test_leaving_in_the_middle_gives_the_memory_back(tmp_path, backend):
    path = str(tmp_path / "m.safetensors")
    save_file({f"t{n:02}": torch.full((MiB,), float(n)) for n in range(16)}, path)

    def leave(error=None):
        source = stream(path, backend=backend, memory_limit="32MiB")
        for number, _ in enumerate(source):
            if number == 5 and error is not None:
                raise error
            if number == 5:
                return

    leave()
    gc.collect()
    trim()
    before = resident().anon
    for error in (None, ValueError("no"), KeyboardInterrupt()):
        try:
            leave(error)
        except (ValueError, KeyboardInterrupt) as caught:
            caught.__traceback__ = None
        gc.collect()
        trim()
        assert resident().anon - before < 8 * MiB  # of 32 or more
