"""The index file itself: what is read from it, and opening a checkpoint by its index. Case 31 has its quarrels with shards."""

from __future__ import annotations

import pytest
import torch

from streamload import Checkpoint
from streamload.checkpoint.index import Index, read_index
from streamload.testing import write_safetensors
from tests.checkpoint.tools import assert_loads, refused, write_index


def test_what_is_read(tmp_path):
    places = {"b": "x.safetensors", "a": "sub/y.safetensors", "größe": "x.safetensors"}
    path = write_index(tmp_path, {"metadata": {"total_size": 12, "more": "ignored"}, "weight_map": places})
    index = read_index(path)
    assert index == Index(path, places, 12)
    assert list(index.weight_map) == ["b", "a", "größe"]


@pytest.mark.parametrize(
    ("metadata", "total"),
    [
        ({"total_size": 12}, 12),
        ({"total_size": 12.0}, 12),  # some writers divide
        ({"total_size": 1e999}, None),
        ({"total_size": -1e999}, None),
        ({"total_size": float("nan")}, None),
        ({"total_size": "12"}, None),
        ({"total_size": None}, None),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_the_total_size(tmp_path, metadata, total):
    path = write_index(tmp_path, {"metadata": metadata, "weight_map": {"a": "x.safetensors"}})
    assert read_index(path).total_size == total


def test_the_total_size_may_be_left_out(tmp_path):
    assert read_index(write_index(tmp_path, {"weight_map": {"a": "x.safetensors"}})).total_size is None


@pytest.fixture
def folder(tmp_path):
    for number in (1, 2, 10):
        write_safetensors(tmp_path / f"s{number}.safetensors", {f"t{number}": torch.full([2], float(number))})
    places = {f"t{number}": f"s{number}.safetensors" for number in (10, 2, 1)}
    write_index(tmp_path, {"weight_map": places})
    return tmp_path


def test_shards_come_in_natural_order(folder):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == tuple(str(folder / f"s{number}.safetensors") for number in (1, 2, 10))
    assert list(checkpoint.tensors) == ["t1", "t2", "t10"]


def test_an_index_can_be_named_instead_of_its_folder(folder):
    index = folder / "model.safetensors.index.json"
    by_index, by_folder = Checkpoint.open(index), Checkpoint.open(folder)
    assert by_index.tensors == by_folder.tensors
    assert (by_index.location, by_folder.location) == (str(index), str(folder))
    assert_loads(index, {f"t{number}": torch.full([2], float(number)) for number in (1, 2, 10)})


def test_an_index_named_by_a_relative_path(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for location in ("model.safetensors.index.json", "."):
        assert list(Checkpoint.open(location).tensors) == ["t1", "t2", "t10"]
        assert_loads(location, {f"t{number}": torch.full([2], float(number)) for number in (1, 2, 10)})


def test_an_index_of_torch_files(tmp_path):
    torch.save({"a": torch.tensor([1.0])}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.tensor([2.0])}, tmp_path / "pytorch_model-00002-of-00002.bin")
    places = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = write_index(tmp_path, {"metadata": {"total_size": 8}, "weight_map": places}, "pytorch_model.bin.index.json")
    checkpoint = Checkpoint.open(tmp_path)
    assert [checkpoint.tensors[name].file for name in "ab"] == [str(tmp_path / place) for place in places.values()]
    assert_loads(tmp_path, {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])})
    write_index(tmp_path, {"weight_map": {"a": places["b"], "b": places["b"]}}, "pytorch_model.bin.index.json")
    refused(tmp_path, "tensor 'a' is in no shard", places["b"], path=index)


def test_one_index_over_both_formats(tmp_path):
    torch.save({"a": torch.tensor([1.0])}, tmp_path / "x.bin")
    write_safetensors(tmp_path / "y.safetensors", {"b": torch.tensor([2.0])})
    write_index(tmp_path, {"weight_map": {"a": "x.bin", "b": "y.safetensors"}})
    assert_loads(tmp_path, {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])})


def test_an_index_that_cannot_be_read(tmp_path):
    (tmp_path / "model.safetensors.index.json").symlink_to("nowhere")
    index = tmp_path / "model.safetensors.index.json"
    refused(tmp_path, "cannot be read: No such file or directory", path=index)


def test_two_spellings_of_one_file(tmp_path):
    write_safetensors(tmp_path / "m.safetensors", {"a": torch.full([2], 1.0), "b": torch.full([2], 2.0)})
    index = write_index(tmp_path, {"weight_map": {"a": "m.safetensors", "b": ".//m.safetensors"}})
    checkpoint = Checkpoint.open(index)
    assert checkpoint.files == (str(tmp_path / "m.safetensors"),)
    assert_loads(checkpoint, {"a": torch.full([2], 1.0), "b": torch.full([2], 2.0)})
