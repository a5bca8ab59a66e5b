"""Case 31: an index that disagrees with its shards is an error with a cause, found from headers alone."""

from __future__ import annotations

import json
import os

import pytest
import torch

import streamload
from streamload import Checkpoint, CheckpointError
from streamload.testing import module_of, write_safetensors, write_sharded
from tests.checkpoint.tools import assert_loads, refused, write_index

A, B, C = torch.full([2], 1.0), torch.full([3], 2.0), torch.full([4], 3.0)


@pytest.fixture
def folder(tmp_path):
    """Two shards: ``a`` and ``c`` in the first, ``b`` in the second, and an index that is right."""
    write_sharded(tmp_path, {"s1.safetensors": {"a": A, "c": C}, "s2.safetensors": {"b": B}})
    return tmp_path


def _index(folder, total_size=None, **weight_map):
    metadata = {} if total_size is None else {"total_size": total_size}
    return write_index(folder, {"metadata": metadata, "weight_map": weight_map})


def test_what_is_right_opens_without_a_note(folder):
    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.tensors) == ["a", "c", "b"]
    assert checkpoint.notes == ()
    assert_loads(checkpoint, {"a": A, "b": B, "c": C})


def test_a_missing_shard(folder):
    os.remove(folder / "s2.safetensors")
    index = folder / "model.safetensors.index.json"
    refused(folder, "1 of the 2 shards", "missing: s2.safetensors (1 tensors)", "download incomplete", path=index)


def test_many_missing_shards_are_counted_and_the_first_ones_named(tmp_path):
    index = write_index(tmp_path, {"weight_map": {f"t{n}": f"model-{n}.safetensors" for n in range(1, 21)}})
    write_safetensors(tmp_path / "model-2.safetensors", {"t2": A})
    words = ["19 of the 20 shards", "model-1.safetensors (1 tensors), model-3.safetensors", "and 9 more"]
    assert "model-2.safetensors" not in str(refused(tmp_path, *words, path=index))


def test_nothing_is_loaded_when_a_shard_is_missing(folder):
    os.remove(folder / "s2.safetensors")
    module = module_of({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"missing: s2\.safetensors"):
        streamload.load(module, folder, strict=False)
    assert not any(parameter.any() for parameter in module.parameters())


def test_a_tensor_that_lies_in_another_shard(folder):
    index = _index(folder, a="s1.safetensors", b="s1.safetensors", c="s2.safetensors")
    error = refused(folder, "s1.safetensors does not contain tensor 'b'", "it is in s2.safetensors", path=index)
    assert error.tensor == "b"
    assert "(2 such tensors)" in str(error)


def test_a_tensor_that_lies_in_a_shard_the_index_does_not_name(folder):
    # s2, where b is, is not part of this checkpoint then, so b cannot be found.
    index = _index(folder, a="s1.safetensors", b="s1.safetensors", c="s1.safetensors")
    error = refused(folder, "tensor 'b' is in no shard", "places it in s1.safetensors", path=index)
    assert error.tensor == "b"


def test_a_name_that_no_shard_has(folder):
    places = {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s1.safetensors", "mtp.fc.weight": "s2.safetensors"}
    index = _index(folder, **places)
    words = ["'mtp.fc.weight' is in no shard", "places it in s2.safetensors", "another version"]
    assert refused(folder, *words, path=index).tensor == "mtp.fc.weight"


def test_the_three_messages_differ(folder):
    messages = []
    right = {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s1.safetensors"}
    for wrong in ({"d": "s3.safetensors"}, {"b": "s1.safetensors", "c": "s2.safetensors"}, {"d": "s2.safetensors"}):
        messages.append(str(refused(folder, path=_index(folder, **(right | wrong)))))
    for words in ("shards that it names are missing", "it is in s2.safetensors", "is in no shard"):
        assert sum(words in message for message in messages) == 1


def test_a_tensor_that_the_index_omits(folder):
    _index(folder, a="s1.safetensors", b="s2.safetensors")

    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.tensors) == ["a", "c", "b"]  # file order, as if the index had named it
    (note,) = checkpoint.notes
    assert "1 tensors are in the shards but not in the index (c): loaded all the same" in note
    report = assert_loads(checkpoint, {"a": A, "b": B, "c": C})
    assert note in report.notes

    checkpoint = Checkpoint.open(folder, unindexed="ignore")
    assert list(checkpoint.tensors) == ["a", "b"]
    (note,) = checkpoint.notes
    assert "1 tensors are in the shards but not in the index (c): ignored" in note
    assert_loads(checkpoint, {"a": A, "b": B})


def test_a_tensor_that_the_index_omits_and_two_shards_have(folder):
    write_safetensors(folder / "s2.safetensors", {"b": B, "c": C})
    _index(folder, a="s1.safetensors", b="s2.safetensors")
    error = refused(folder, "'c' is also in", folder / "s1.safetensors", "no index", path=folder / "s2.safetensors")
    assert error.tensor == "c"
    assert list(Checkpoint.open(folder, unindexed="ignore").tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, ["expected a weight_map", "found none"]),
        ({"weight_map": None}, ["expected a weight_map", "found none"]),
        ({"weight_map": {}}, ["expected a weight_map", "found {}"]),
        ({"weight_map": ["a", "b"]}, ["expected a weight_map", "found ['a', 'b']"]),
        ([], ["expected a weight_map", "found none"]),
        ({"weight_map": {"a": 1}}, ["tensor 'a' is mapped to 1", "expected the name of a file"]),
        ({"weight_map": {"a": None}}, ["tensor 'a' is mapped to None", "expected the name of a file"]),
        ({"weight_map": {"a": ["s1.safetensors"]}}, ["tensor 'a' is mapped to ['s1.safetensors']"]),
        ("", ["not valid JSON"]),
        ('{"weight_map": {"a": "s1.safe', ["not valid JSON"]),
        ("[" * 100_000, ["not valid JSON"]),
    ],
)
def test_an_index_that_is_no_index(folder, content, words):
    refused(folder, *words, path=write_index(folder, content))


def test_an_index_that_is_not_utf8(folder):
    index = folder / "model.safetensors.index.json"
    index.write_bytes(b'{"weight_map": {"\xe4": "s1.safetensors"}}')
    refused(folder, "not valid JSON", path=index)


def test_an_index_that_gives_one_tensor_two_places(folder):
    text = (
        '{"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s1.safetensors", "a": "s2.safetensors"}}'
    )
    error = refused(folder, "'a'", "'s1.safetensors'", "'s2.safetensors'", path=write_index(folder, text))
    assert error.tensor == "a"
    # Twice the same place is no contradiction.
    write_index(folder, text.replace('"a": "s2', '"a": "s1'))
    assert list(Checkpoint.open(folder).tensors) == ["a", "c", "b"]


def test_a_wrong_total_size_is_noted(folder):
    _index(folder, 35, a="s1.safetensors", b="s2.safetensors", c="s1.safetensors")
    checkpoint = Checkpoint.open(folder)
    (note,) = checkpoint.notes
    assert "total_size says 35 bytes, the shards hold 36" in note
    assert note in assert_loads(checkpoint, {"a": A, "b": B, "c": C}).notes


@pytest.mark.parametrize("total_size", [36, 36.0, "36", None, float("inf"), float("nan")])
def test_a_total_size_that_is_right_or_says_nothing_is_not_noted(folder, total_size):
    _index(folder, total_size, a="s1.safetensors", b="s2.safetensors", c="s1.safetensors")
    assert Checkpoint.open(folder).notes == ()


def test_metadata_of_another_kind_is_passed_over(folder):
    right = json.loads((folder / "model.safetensors.index.json").read_text())
    write_index(folder, right | {"metadata": "none"})
    assert Checkpoint.open(folder).nbytes == 36
