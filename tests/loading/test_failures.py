"""A load that breaks off: what it says, what it leaves behind, and that nothing is pinned."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch

from streamload import Checkpoint, LoadError, load, partial_load
from streamload.errors import SourceError
from streamload.sources.system import read_at
from streamload.testing import module_of, write_safetensors
from tests.cache import evict, warm

COUNT = 40
TENSORS = {f"layers.{n}.w": torch.full((1000, 250), float(n)) for n in range(COUNT)}  # 1 MB each


@pytest.fixture
def path(tmp_path) -> str:
    return write_safetensors(tmp_path / "model.safetensors", TENSORS)


def module(device: str = "cpu") -> torch.nn.Module:
    return module_of({name: torch.zeros(1000, 250, device=device) for name in TENSORS})


@pytest.fixture
def cut(monkeypatch, path):
    """A function that says at which byte another program cuts the file off, right after the first bytes were read."""

    def at(end: int) -> None:
        def read_and_cut(fd: int, *args: object, **options: object) -> int:
            got = read_at(fd, *args, **options)
            if os.fstat(fd).st_size > end:
                os.truncate(path, end)
            return got

        monkeypatch.setattr("streamload.sources.file.read_at", read_and_cut)

    return at


def left_open() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("state", [warm, evict])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_file_cut_while_it_is_read(path, cut, state, dtype):
    checkpoint = Checkpoint.open(path)
    state(path)
    end = checkpoint.tensors["layers.30.w"].offset + 1000
    before, target = left_open(), module()
    cut(end)
    with pytest.raises(LoadError) as caught:
        load(target, checkpoint, dtype=dtype, threads=1)
    text = str(caught.value)
    assert f"tensor 'layers.30.w' (31 of {COUNT}) of {path}" in text
    assert f"the file ends at byte {end:,}" in text
    assert "of 40,000,000 bytes" in text
    assert isinstance(caught.value.__cause__, SourceError)
    assert 0 < caught.value.report.bytes_read < 31_000_000
    assert left_open() == before
    assert "layers.30.w" in partial_load(target)


def test_a_file_cut_before_it_is_read(path):
    checkpoint = Checkpoint.open(path)
    os.truncate(path, 1000)
    with pytest.raises(
        LoadError, match=r"tensor 'layers\.0\.w' \(1 of 40\).*after 0 of 40,000,000 bytes.*cut short after"
    ):
        load(module(), checkpoint)


def test_a_file_that_vanished(path):
    checkpoint = Checkpoint.open(path)
    os.unlink(path)
    with pytest.raises(LoadError, match="cannot be opened: No such file"):
        load(module(), checkpoint)


@pytest.mark.parametrize("failure", [ValueError("enough"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_exception_in_the_callback_is_passed_on_with_a_note(path, failure, device):
    before, target = left_open(), module(device)

    def cancel(progress):
        raise failure

    with pytest.raises(type(failure)) as caught:
        load(target, path, progress=cancel)
    assert caught.value is failure
    (note,) = failure.__notes__
    assert f"of {COUNT}) of {path}, after " in note
    assert "only partly loaded" in note
    assert left_open() == before
    failure.__notes__.clear()


@pytest.mark.parametrize("reason", ["callback", "cut", "interrupt"])
def test_memory_is_collectable_while_the_exception_is_held(path, cut, reason):
    checkpoint, target = Checkpoint.open(path), module("meta")
    if reason == "cut":
        cut(20_000_000)

    def fail(progress):
        if reason == "cut":
            return
        if reason == "callback":
            raise ValueError
        raise KeyboardInterrupt

    held = None
    try:
        load(target, checkpoint, progress=fail)
    except BaseException as error:
        held = error
    assert held is not None
    watched = [weakref.ref(parameter) for parameter in target.parameters()]
    assert not target.layers.get_submodule("0").w.is_meta
    del target
    gc.collect()
    assert [ref() for ref in watched] == [None] * COUNT


def test_the_module_refuses_to_run_until_it_is_loaded(path):
    target = module()
    target.forward = lambda x: x + target.layers.get_submodule("1").w[0, 0]

    def cancel(progress):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        load(target, path, progress=cancel)
    with pytest.raises(LoadError, match=r"this Module is only partly loaded and cannot be used: ValueError at tensor"):
        target(torch.zeros(1))
    with pytest.raises(ValueError, match="enough"):
        load(target, path, progress=cancel)
    load(target, path)
    assert partial_load(target) is None
    assert target(torch.zeros(1)).item() == 1.0


def test_no_memory_for_the_parameters(tmp_path):
    """RLIMIT_DATA stands in for a host without memory: the allocation fails, and the message says which one."""
    tensors = {f"t{n}": torch.full((1 << 22,), float(n)) for n in range(8)}  # 16 MiB each
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    script = f"""
        import resource, sys, torch
        from streamload import load, partial_load
        from streamload.errors import BudgetError
        from streamload.testing import module_of
        module = module_of({{f"t{{n}}": torch.empty(1 << 22, device="meta") for n in range(8)}})
        data = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (data + (100 << 20),) * 2)
        try:
            load(module, {path!r}, threads=1)
        except BudgetError as error:
            print(error, "|", *error.__notes__, "|", partial_load(module))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no memory for t" in done.stdout
    assert "16,777,216 bytes on cpu" in done.stdout
    assert "of 8)" in done.stdout
    assert "only partly loaded" in done.stdout


@pytest.mark.parametrize("state", [warm, evict])
def test_ctrl_c(path, state, tmp_path):
    """A real SIGINT in the middle of a load, which a slow callback holds there."""
    state(path)
    script = f"""
        import os, signal, sys, threading, time, torch
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        from streamload import load
        from streamload.testing import module_of
        module = module_of({{f"layers.{{n}}.w": torch.zeros(1000, 250) for n in range({COUNT})}})
        def slow(progress):
            print("reading", flush=True)
            time.sleep(30)
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        try:
            load(module, {path!r}, progress=slow)
        except KeyboardInterrupt as error:
            print(*error.__notes__)
            print("left", before == (threading.active_count(), len(os.listdir("/proc/self/fd"))))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert f"of {COUNT}) of {path}, after" in output
    assert "left True" in output
