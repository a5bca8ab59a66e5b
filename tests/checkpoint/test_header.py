"""The header of one safetensors file: what is read from it, in which order, and that damage is always told as such."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch

from streamload import Checkpoint, CheckpointError, TensorSpec
from streamload.checkpoint.header import read_header
from streamload.testing import write_raw, write_safetensors
from tests.checkpoint.tools import assert_loads, entry, refused, write_header


def test_every_field_of_a_spec(tmp_path):
    tensors = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(3)}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    start = os.path.getsize(path) - 24
    assert Checkpoint.open(path).tensors == {
        "w": TensorSpec("w", "BF16", (2, 3), path, start, 12),
        "b": TensorSpec("b", "F32", (3,), path, start + 12, 12),
    }


def test_a_spec_knows_its_sizes():
    dense = TensorSpec("a", "F32", (2, 3), "x", 100, 24)
    assert (dense.numel, dense.span, dense.strides) == (6, 24, None)
    # A transposed view of 4 columns: from the first element to the last are 2 * 4 + 1 more.
    view = TensorSpec("a", "F32", (2, 3), "x", 100, 24, (1, 4))
    assert (view.numel, view.span) == (6, 40)
    empty = TensorSpec("a", "F32", (0, 3), "x", 100, 0, (1, 4))
    assert (empty.numel, empty.span) == (0, 0)


def test_specs_come_in_file_order_whatever_the_order_of_the_names(tmp_path):
    header = {"z": entry("U8", [2], 0, 2), "a": entry("U8", [3], 5, 8), "m": entry("U8", [3], 2, 5)}
    specs, metadata = read_header(write_header(tmp_path / "x.safetensors", header, b"zzmmmaaa"))
    assert [spec.name for spec in specs] == ["z", "m", "a"]
    assert metadata == {}
    expected = {"z": b"zz", "m": b"mmm", "a": b"aaa"}
    assert_loads(
        tmp_path / "x.safetensors",
        {name: torch.tensor(list(data), dtype=torch.uint8) for name, data in expected.items()},
    )


def test_empty_tensors_come_before_what_starts_where_they_lie(tmp_path):
    header = {
        "full": entry("U8", [2], 0, 2),
        "start": entry("U8", [0], 0, 0),
        "middle": entry("F32", [0, 4], 2, 2),
        "rest": entry("U8", [1], 2, 3),
        "end": entry("U8", [0], 3, 3),
    }
    specs, _ = read_header(write_header(tmp_path / "x.safetensors", header, b"abc"))
    assert [spec.name for spec in specs] == ["start", "full", "middle", "rest", "end"]


def test_an_empty_header_is_a_checkpoint_of_no_tensors(tmp_path):
    checkpoint = Checkpoint.open(write_header(tmp_path / "x.safetensors", "{}"))
    assert (len(checkpoint), checkpoint.nbytes) == (0, 0)


def test_metadata_is_kept(tmp_path):
    metadata = {"format": "pt", "größe": '{"quoted": "json"}', "dtype": "shape"}
    path = write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(1)}, metadata=metadata)
    assert Checkpoint.open(path).metadata == metadata
    null = write_header(tmp_path / "y.safetensors", {"__metadata__": None})  # as good as none, also to the library
    assert Checkpoint.open(null).metadata == {}


def test_names_that_look_like_the_fields_of_an_entry(tmp_path):
    names = ["dtype", "shape", "data_offsets", "metadata", "", " ", '"dtype"', "a\nb", "a\\b", "\x7f", "é"]
    tensors = {name: torch.tensor([float(n)]) for n, name in enumerate(names)}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    assert list(Checkpoint.open(path).tensors) == names


def test_fields_in_any_order_and_unknown_ones(tmp_path):
    header = '{"a":{"data_offsets":[0,4],"extra":{"deep":[1]},"shape":[1],"dtype":"F32"}}'
    checkpoint = Checkpoint.open(write_header(tmp_path / "x.safetensors", header, bytes(4)))
    assert checkpoint.tensors["a"].shape == (1,)


def test_the_quick_way_and_the_slow_way_agree(tmp_path):
    # One F4 tensor makes the whole header take the slow way.
    plain = {f"t{n}": entry("F32", [n % 3, 2], 0, 0) for n in range(50)}
    end = 0
    for each in plain.values():
        size = each["shape"][0] * 8
        each["data_offsets"] = [end, end + size]
        end += size
    packed = plain | {"f4": entry("F4", [2], end, end + 1)}
    quick, _ = read_header(write_header(tmp_path / "x.safetensors", plain, bytes(end)))
    slow, _ = read_header(write_header(tmp_path / "y.safetensors", packed, bytes(end + 1)))
    assert slow.pop().name == "f4"
    for one, other in zip(quick, slow, strict=True):
        shift = slow[0].offset - quick[0].offset
        assert one._replace(file="", offset=one.offset + shift) == other._replace(file="")


def test_one_fault_among_many_tensors_is_named(tmp_path):
    header = {f"t{n}": entry("U8", [1], n, n + 1) for n in range(1000)}
    header["t700"] = entry("U8", [2], 700, 701)
    error = refused(write_header(tmp_path / "x.safetensors", header, bytes(1000)), "'t700'", "U8 [2] takes 2 bytes")
    assert error.tensor == "t700"


def test_numbers_beyond_64_bits(tmp_path):
    huge = 10**30
    header = {"a": entry("U8", [huge], 0, huge)}
    refused(write_header(tmp_path / "x.safetensors", header), f"{huge:,} are missing", "'a'")
    header = {"a": entry("U8", [0, huge], 0, 0)}  # no elements, so this is in order
    assert Checkpoint.open(write_header(tmp_path / "y.safetensors", header)).tensors["a"].numel == 0


def test_a_file_without_a_known_ending_is_read_as_what_it_is(tmp_path):
    tensors = {"a": torch.tensor([1.0])}
    assert_loads(write_safetensors(tmp_path / "blob", tensors), tensors)
    torch.save(tensors, tmp_path / "saved")
    assert_loads(tmp_path / "saved", tensors)


def test_a_file_that_cannot_be_opened(tmp_path):
    os.mkdir(tmp_path / "m")
    os.symlink("m", tmp_path / "loop.safetensors")
    refused(tmp_path / "loop.safetensors", "no weights here")  # a link to a folder is a folder
    os.symlink("nowhere", tmp_path / "m" / "model.safetensors")
    refused(tmp_path / "m", "No such file or directory", path=tmp_path / "m" / "model.safetensors")


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_an_error_or_harmless(tmp_path, seed):
    # Whatever bytes change, the answer is a catalog that fits into the file, or a CheckpointError that names it.
    path = write_safetensors(
        tmp_path / "x.safetensors", {"a": torch.ones(3, 4), "b": torch.ones(2)}, metadata={"format": "pt"}
    )
    with open(path, "rb") as file:
        good = file.read()
    rng, errors = random.Random(seed), 0
    for _ in range(500):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(good) - 56)] = rng.randrange(256)
        with open(path, "wb") as file:
            file.write(damaged)
        try:
            specs = Checkpoint.open(path).tensors.values()
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: ")
            errors += 1
        else:
            assert max(spec.offset + spec.nbytes for spec in specs) == len(good)
    assert errors > 250  # or the damage is none


def test_json_spread_over_lines_and_padded(tmp_path):
    header = {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 8, 12)}
    text = json.dumps(header, indent=4) + "  \n\t "
    path = write_raw(tmp_path / "x.safetensors", text.encode(), [bytes(12)])
    assert list(Checkpoint.open(path).tensors) == ["a", "b"]
