"""Files that are made to hang, crash or mislead the reader."""

from __future__ import annotations

import json
import os
import pickle
import zipfile

import pytest
import torch

from streamload import Checkpoint, CheckpointError
from streamload.testing import write_raw, write_safetensors
from tests.checkpoint.tools import assert_loads, refused, write_index


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.safetensors.index.json"])
def test_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    for location in (tmp_path, tmp_path / name):
        refused(location, "is a pipe, a socket or a device", path=tmp_path / name)


def test_links_in_a_circle_beside_the_weights(tmp_path):
    os.symlink("loop", tmp_path / "loop")
    write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    assert_loads(tmp_path, {"a": torch.ones(2)})


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (["aaaaaaaa", 1_000_000_000], "is not a list of sizes"),
        ([[0], 20_000_000], "is not a list of sizes"),
        ([int("9" * 4300)] * 3, "beyond what a tensor can have"),
        ([1] * 65, "beyond what a tensor can have"),
    ],
)
def test_a_shape_that_would_take_long_to_multiply(tmp_path, shape, why):
    header = {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}}
    refused(write_raw(tmp_path / "x.safetensors", json.dumps(header).encode(), [b"1"]), why)


def test_an_entry_too_deep_to_print(tmp_path):
    text = '{"a": ' + '{"b": ' * 900 + "1" + "}" * 901
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    refused(path, "its entry needs dtype, shape and data_offsets")


def test_an_index_with_numbers_of_many_digits(tmp_path):
    name = "1" * 200 + ".safetensors"
    write_safetensors(tmp_path / name, {"a": torch.ones(2)})
    write_index(tmp_path, {"metadata": {"total_size": 10**400}, "weight_map": {"a": name}})
    assert any("total_size says" in note for note in Checkpoint.open(tmp_path).notes)


def test_a_byte_order_that_unpacks_to_gigabytes(tmp_path):
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("x/byteorder", b"little" + bytes(50_000_000), compress_type=zipfile.ZIP_DEFLATED)
    refused(path, "not written on a little-endian machine")


#: GLOBAL, then the state (None, {"__defaults__": ()}), then BUILD, which would set the function's defaults.
ATTACK = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__)s\x86b."


def test_a_pickle_cannot_alter_the_reader(tmp_path):
    path, honest = tmp_path / "x.bin", tmp_path / "honest.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", ATTACK)
    refused(path, "data.pkl is damaged: UnpicklingError: it tries to alter a function")
    torch.save({"a": torch.ones(2)}, honest)
    assert_loads(honest, {"a": torch.ones(2)})


@pytest.mark.parametrize(
    "key",
    [
        b")" + b"\x85" * 3_000_000,  # a tuple in a tuple in a tuple: hashing it needs more stack than there is
        b")q\x00" + b"0h\x00h\x00\x86q\x00" * 60,  # each holds the one before twice: hashing it takes 2**60 steps
    ],
    ids=["deep", "doubled"],
)
def test_a_key_that_cannot_be_hashed(tmp_path, key):
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}" + key + b"K\x01s.")
    refused(path, "data.pkl is damaged: UnpicklingError: a key that is made of too many parts")


@pytest.mark.parametrize("options", [{"unindexed": "Load"}, {"revision": 5}], ids=["unindexed", "revision"])
def test_arguments(tmp_path, options):
    path = write_safetensors(tmp_path / "m.safetensors", {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=f"{next(iter(options))}="):
        Checkpoint.open(path, **options)


def test_a_path_in_bytes(tmp_path):
    with pytest.raises(CheckpointError, match="expected a path as a string, found bytes"):
        Checkpoint.open(os.fsencode(tmp_path))


def test_a_torch_file_that_was_named_says_nothing_of_the_folder(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "own.pt")
    assert Checkpoint.open(tmp_path / "own.pt").notes == ()
    assert any("no safetensors there" in note for note in Checkpoint.open(tmp_path).notes)
