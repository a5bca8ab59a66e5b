"""Case 33: which files of a crowded folder are the checkpoint, and why the others are not."""

from __future__ import annotations

import os

import pytest
import torch

from streamload import Checkpoint
from streamload.testing import write_safetensors
from tests.checkpoint.tools import assert_loads, refused, write_index

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

#: Every other file with weights in it, and a value that tells it from the rest.
OTHERS = {
    "consolidated.safetensors": 3.0,
    "model.safetensors": 4.0,
    "pytorch_model.bin": 5.0,
    "training_args.bin": 6.0,
    "optimizer.bin": 7.0,
    "adapter_model.safetensors": 8.0,
    "original/x.safetensors": 9.0,
    "model.fp16.safetensors": 10.0,
    ".cache/x.safetensors": 11.0,
}


@pytest.fixture
def folder(tmp_path):
    """A folder in which everything lies side by side. Every file holds ``a``; what a load finds there shows which was read."""
    write_safetensors(tmp_path / SHARDS[0], {"a": torch.full([2], 1.0)})
    write_safetensors(tmp_path / SHARDS[1], {"b": torch.full([2], 2.0)})
    write_index(tmp_path, {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    for name, value in OTHERS.items():
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        tensors = {"a": torch.full([2], value)}
        if name.endswith(".bin"):
            torch.save(tensors, tmp_path / name)
        else:
            write_safetensors(tmp_path / name, tensors)
    (tmp_path / "notes.safetensors.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def _remove(folder, *names):
    for name in names:
        os.remove(folder / name)


def _assert_one(folder, name, value, ignored):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == (str(folder / name),)
    assert checkpoint.ignored.items() >= ignored.items()
    assert_loads(checkpoint, {"a": torch.full([2], value)})


def test_the_index_wins_over_everything(folder):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == tuple(str(folder / name) for name in SHARDS)
    why = "the index model.safetensors.index.json decides"
    assert checkpoint.ignored == {
        "consolidated.safetensors": why,
        "model.safetensors": why,
        "pytorch_model.bin": why,
        "model.fp16.safetensors": why,
        "training_args.bin": "training state",
        "optimizer.bin": "optimizer state",
        "adapter_model.safetensors": "an adapter, not the model",
        "original/x.safetensors": "in a sub-folder",
        ".cache/x.safetensors": "in a sub-folder",
    }
    assert_loads(checkpoint, {"a": torch.full([2], 1.0), "b": torch.full([2], 2.0)})


def test_the_index_wins_whatever_its_shards_are_called(folder):
    os.rename(folder / SHARDS[0], folder / "weights.part-one.safetensors")
    os.rename(folder / SHARDS[1], folder / "original" / "two.safetensors")
    places = {"a": "weights.part-one.safetensors", "b": "original/two.safetensors"}
    write_index(folder, {"weight_map": places})
    checkpoint = Checkpoint.open(folder)
    assert sorted(checkpoint.files) == sorted(str(folder / name) for name in places.values())
    assert not places.values() & checkpoint.ignored.keys()
    assert_loads(checkpoint, {"a": torch.full([2], 1.0), "b": torch.full([2], 2.0)})


def test_removing_one_after_the_other(folder):
    # Each removal uncovers the next choice.
    _remove(folder, "model.safetensors.index.json")
    whole = "model.safetensors is the whole checkpoint"
    _assert_one(folder, "model.safetensors", 4.0, {SHARDS[0]: whole, SHARDS[1]: whole, "pytorch_model.bin": whole})

    _remove(folder, "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == tuple(str(folder / name) for name in SHARDS)
    assert checkpoint.ignored["model.fp16.safetensors"] == f"not part of {SHARDS[0]} and its family"
    assert checkpoint.ignored["consolidated.safetensors"] == f"not part of {SHARDS[0]} and its family"
    assert_loads(checkpoint, {"a": torch.full([2], 1.0), "b": torch.full([2], 2.0)})

    # Half a family is no checkpoint, and what lies beside it is no reason to overlook that.
    _remove(folder, SHARDS[0])
    refused(folder, "1 of 2 shards of model-*.safetensors are here", "missing: 1", "download incomplete")

    _remove(folder, SHARDS[1])
    variant = {"consolidated.safetensors": "another variant or format of the files taken"}
    _assert_one(folder, "model.fp16.safetensors", 10.0, variant)

    _remove(folder, "model.fp16.safetensors")
    _assert_one(folder, "consolidated.safetensors", 3.0, {"original/x.safetensors": "in a sub-folder"})

    _remove(folder, "consolidated.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == (str(folder / "pytorch_model.bin"),)
    assert any("torch's own format (pytorch_model.bin)" in note for note in checkpoint.notes)
    report = assert_loads(checkpoint, {"a": torch.full([2], 5.0)})
    assert any("pytorch_model.bin" in note for note in report.notes)

    _remove(folder, "pytorch_model.bin")
    refused(
        folder,
        "no weights here that make up a model",
        "training_args.bin is training state",
        "optimizer.bin is optimizer state",
        "adapter_model.safetensors is an adapter",
    )


def test_consolidated_is_read_when_asked_for(folder):
    checkpoint = Checkpoint.open(folder / "consolidated.safetensors")
    assert checkpoint.files == (str(folder / "consolidated.safetensors"),)
    assert_loads(checkpoint, {"a": torch.full([2], 3.0)})


def test_two_complete_families_without_an_index(folder):
    _remove(folder, "model.safetensors.index.json", "model.safetensors")
    write_safetensors(folder / "other-00001-of-00001.safetensors", {"a": torch.ones(2)})
    refused(folder, "two complete sets", f"{SHARDS[0]} (2 files)", "other-00001-of-00001.safetensors (1 files)")


def test_of_two_families_the_complete_one_is_taken(folder):
    _remove(folder, "model.safetensors.index.json", "model.safetensors")
    write_safetensors(folder / "other-00001-of-00002.safetensors", {"a": torch.ones(2)})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == tuple(str(folder / name) for name in SHARDS)
    assert "other-00001-of-00002.safetensors" in checkpoint.ignored


def test_two_indexes_of_one_format(folder):
    write_index(folder, {"weight_map": {"a": SHARDS[0]}}, "other.safetensors.index.json")
    # The usual name wins; without it, none does.
    assert Checkpoint.open(folder).files == tuple(str(folder / name) for name in SHARDS)
    os.rename(folder / "model.safetensors.index.json", folder / "third.safetensors.index.json")
    refused(folder, "several indexes", "other.safetensors.index.json", "third.safetensors.index.json")
    checkpoint = Checkpoint.open(folder / "other.safetensors.index.json")
    assert checkpoint.files == (str(folder / SHARDS[0]),)


def test_an_empty_folder_and_no_folder(tmp_path):
    refused(tmp_path, "no weights here", "*.safetensors, *.bin, *.pt, *.pth")
    refused(tmp_path / "nowhere", "no such file or folder")
