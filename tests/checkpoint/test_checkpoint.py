"""Opening a checkpoint as a whole, by every kind of location, and without torch."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest
import torch

import streamload
from streamload import Checkpoint, CheckpointError, TensorSpec
from streamload.testing import write_safetensors, write_sharded
from tests.checkpoint.tools import assert_loads, refused

TENSORS = {"a": torch.full([2, 2], 1.0), "b": torch.full([3], 2.0, dtype=torch.bfloat16)}


def _python(code, *arguments, **environment):
    """Run ``code`` in a fresh interpreter; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_one_file(tmp_path, kind):
    path = write_safetensors(tmp_path / "model.safetensors", TENSORS)
    for location in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = Checkpoint.open(kind(location))
        assert checkpoint.location == str(location)
        assert checkpoint.files == (path,)
        assert (len(checkpoint), checkpoint.nbytes) == (2, 22)
        assert list(checkpoint.tensors) == ["a", "b"]
        assert (checkpoint.ignored, checkpoint.skipped, checkpoint.notes) == ({}, (), ())


def test_shards(tmp_path):
    folder = write_sharded(tmp_path, {"s1.safetensors": {"a": TENSORS["a"]}, "s2.safetensors": {"b": TENSORS["b"]}})
    checkpoint = Checkpoint.open(folder)
    assert [os.path.basename(file) for file in checkpoint.files] == ["s1.safetensors", "s2.safetensors"]
    assert [os.path.basename(spec.file) for spec in checkpoint.tensors.values()] == ["s1.safetensors", "s2.safetensors"]
    assert_loads(checkpoint, TENSORS)


def test_a_numbered_family_without_an_index(tmp_path):
    for number, (name, tensor) in enumerate(TENSORS.items(), 1):
        write_safetensors(tmp_path / f"model-{number:05}-of-00002.safetensors", {name: tensor})
    assert_loads(tmp_path, TENSORS)
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"a": TENSORS["a"]})
    second = tmp_path / "model-00002-of-00002.safetensors"
    refused(tmp_path, "tensor 'a' is also in", "model-00001-of-00002.safetensors", path=second)


def test_the_metadata_of_the_first_shard_that_has_some(tmp_path):
    write_safetensors(tmp_path / "model-00001-of-00003.safetensors", {"a": torch.ones(1)})
    write_safetensors(tmp_path / "model-00002-of-00003.safetensors", {"b": torch.ones(1)}, metadata={"format": "pt"})
    write_safetensors(tmp_path / "model-00003-of-00003.safetensors", {"c": torch.ones(1)}, metadata={"format": "np"})
    assert Checkpoint.open(tmp_path).metadata == {"format": "pt"}


def test_how_it_is_shown(tmp_path):
    checkpoint = Checkpoint.open(write_safetensors(tmp_path / "model.safetensors", TENSORS))
    assert repr(checkpoint) == f"Checkpoint('{tmp_path}/model.safetensors', 2 tensors, 1 files, 22 bytes)"
    assert isinstance(checkpoint.tensors["a"], TensorSpec)


def test_an_open_checkpoint_holds_no_file_open(tmp_path):
    paths = [write_safetensors(tmp_path / "model.safetensors", TENSORS), str(tmp_path / "model.bin")]
    torch.save(TENSORS, paths[1])
    before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
    checkpoints = [Checkpoint.open(path) for path in paths]
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) == before
    assert [len(checkpoint) for checkpoint in checkpoints] == [2, 2]


def test_the_collector_is_left_as_it_was(tmp_path):
    path = write_safetensors(tmp_path / "model.safetensors", TENSORS)
    for turn_to in (gc.disable, gc.enable):
        turn_to()
        Checkpoint.open(path)
        refused(tmp_path / "nothing.safetensors", "no such file")
        assert gc.isenabled() == (turn_to is gc.enable)


@pytest.mark.parametrize("location", ["s3://bucket/model", "gs://bucket/model/x.safetensors", "https://host/m"])
def test_object_stores_are_refused_by_name(location):
    refused(location, "object stores are not supported yet")


@pytest.mark.parametrize("location", ["", "nowhere", "/nowhere/at/all", "a/b/c", "x.safetensors"])
def test_a_location_that_is_nothing(location, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(location, "no such file or folder")


def _cache(root):
    """A Hugging Face cache with two revisions of one model."""
    home = root / "models--org--tiny"
    for revision, value in {"1111": 1.0, "2222": 2.0}.items():
        os.makedirs(home / "snapshots" / revision)
        os.makedirs(home / "blobs", exist_ok=True)
        write_safetensors(home / "blobs" / revision, {"a": torch.full([2], value)})
        os.symlink(f"../../blobs/{revision}", home / "snapshots" / revision / "model.safetensors")
    os.makedirs(home / "refs")
    (home / "refs" / "main").write_text("1111")
    (home / "refs" / "next").write_text("2222")
    return home


def test_the_name_of_a_cached_model(tmp_path):
    # In a process of its own, since the hub's library reads its environment when it is imported.
    pytest.importorskip("huggingface_hub")
    home = _cache(tmp_path)
    code = """
import json, sys
from streamload import Checkpoint, CheckpointError
found = []
for name, revision in (("org/tiny", None), ("org/tiny", "next"), ("org/tiny", "gone"), ("org/other", None)):
    try:
        found.append(Checkpoint.open(name, revision=revision).files[0])
    except CheckpointError as error:
        found.append(str(error))
print(json.dumps(found))
"""
    first, second, gone, other = json.loads(_python(code, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1"))
    assert first == str(home / "snapshots" / "1111" / "model.safetensors")
    assert second == str(home / "snapshots" / "2222" / "model.safetensors")
    assert gone.startswith("org/tiny: no such file or folder")
    assert "at revision gone" in gone
    assert other.startswith("org/other: no such file or folder")
    assert "hf download org/other" in other


def test_a_folder_is_preferred_to_a_cached_model_of_that_name(tmp_path, monkeypatch):
    os.makedirs(tmp_path / "org" / "tiny")
    write_safetensors(tmp_path / "org" / "tiny" / "model.safetensors", TENSORS)
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.open("org/tiny").files == ("org/tiny/model.safetensors",)


_INSPECT = """
import sys
from streamload.cli import main
try:
    main(["inspect", *sys.argv[1:]])
except SystemExit as exit:
    assert not exit.code
assert "torch" not in sys.modules, "torch was imported"
assert "huggingface_hub" not in sys.modules
"""


def test_importing_streamload_leaves_torch_out():
    code = """
import sys
import streamload
streamload.Checkpoint, streamload.TensorSpec, streamload.CheckpointError, streamload.Limits, dir(streamload)
print([name for name in ("torch", "numpy", "safetensors", "transformers", "click", "rich") if name in sys.modules])
"""
    assert _python(code) == "[]\n"


@pytest.mark.parametrize("options", [(), ("--json",), ("--tensors",)])
def test_inspect_leaves_torch_out(tmp_path, options):
    write_sharded(tmp_path, {"s1.safetensors": {"a": TENSORS["a"]}, "s2.safetensors": {"b": TENSORS["b"]}})
    assert "s1.safetensors" in _python(_INSPECT, *options, tmp_path)


def test_inspect_leaves_torch_out_for_torch_files_too(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    shown = json.loads(_python(_INSPECT, "--json", tmp_path))
    assert {name: (each["dtype"], each["shape"]) for name, each in shown["tensors"].items()} == {
        "a": ("F32", [2, 2]),
        "b": ("BF16", [3]),
    }


def test_inspect_says_everything_as_json(tmp_path):
    write_sharded(tmp_path, {"s1.safetensors": TENSORS, "s2.safetensors": {"c": TENSORS["a"]}})
    write_safetensors(tmp_path / "s2.safetensors", {"c": TENSORS["a"], "a": TENSORS["a"]})
    write_safetensors(tmp_path / "adapter_model.safetensors", TENSORS)
    shown = json.loads(_python(_INSPECT, "--json", tmp_path))
    checkpoint = Checkpoint.open(tmp_path)
    assert shown["files"] == list(checkpoint.files)
    assert shown["nbytes"] == checkpoint.nbytes == 38
    assert shown["ignored"] == {"adapter_model.safetensors": "an adapter, not the model"}
    assert shown["skipped"] == [f"a in {tmp_path}/s2.safetensors"]
    assert shown["notes"] == list(checkpoint.notes)
    assert {name: each["offset"] for name, each in shown["tensors"].items()} == {
        name: spec.offset for name, spec in checkpoint.tensors.items()
    }


def test_a_checkpoint_can_be_loaded_more_than_once(tmp_path):
    checkpoint = Checkpoint.open(write_safetensors(tmp_path / "model.safetensors", TENSORS))
    for _ in range(2):
        assert_loads(checkpoint, TENSORS)
    assert streamload.plan({name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}, checkpoint).ok


def test_a_path_takes_no_revision_and_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    path = write_safetensors(tmp_path / "m.safetensors", {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="is a path, so revision='main' has no meaning"):
        Checkpoint.open(path, revision="main")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(Checkpoint.open("~/m.safetensors").tensors) == ["a"]
