"""Case 36: a header can be wrong in many ways, and each has a message of its own with the numbers in it."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from streamload import Checkpoint
from streamload.testing import write_raw, write_safetensors
from tests.checkpoint.tools import assert_loads, entry, refused, write_header


def test_trailing_bytes_are_refused_unless_allowed(tmp_path):
    tensors = {"a": torch.tensor([1.0, 2.0])}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    right = os.path.getsize(path)
    with open(path, "ab") as file:
        file.write(b"\1\2\3")

    refused(path, f"expected {right} bytes", f"found {right + 3}", "3 bytes after the last tensor", "allow_trailing")

    checkpoint = Checkpoint.open(path, allow_trailing=True)
    assert checkpoint.nbytes == 8
    assert_loads(checkpoint, tensors)


def test_trailing_bytes_after_no_tensor_at_all(tmp_path):
    refused(write_header(tmp_path / "x.safetensors", {}, b"ab"), "expected 10 bytes", "found 12")


@pytest.mark.parametrize(
    ("header", "twice"),
    [
        # The same entry, a different one, one that would be lost without a trace, and those of the keys inside.
        ('{"a": %(a)s, "a": %(a)s}', "a"),
        ('{"a": %(a)s, "b": %(b)s, "a": %(b)s}', "a"),
        ('{"a": "lost", "a": %(a)s}', "a"),
        ('{"a": {}, "b": %(a)s, "a": %(b)s}', "a"),
        ('{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "dtype"),
        ('{"a": {"shape": [9], "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "shape"),
        ('{"__metadata__": {}, "__metadata__": {}, "a": %(a)s}', "__metadata__"),
        ('{"__metadata__": {"k": "1", "k": "2"}, "a": %(a)s}', "k"),
        # An escape in one of the two spellings, and quotation marks in names, must not hide it.
        ('{"a": %(a)s, "\\u0061": %(a)s}', "a"),
        ('{"say \\"hi\\"": %(a)s, "b": %(b)s, "say \\"hi\\"": %(a)s}', 'say "hi"'),
    ],
)
def test_a_key_given_twice(tmp_path, header, twice):
    entries = {"a": json.dumps(entry("F32", [1], 0, 4)), "b": json.dumps(entry("F32", [1], 4, 8))}
    error = refused(write_header(tmp_path / "x.safetensors", header % entries, bytes(8)), f"{twice!r} twice")
    assert error.tensor == twice


def test_unusual_but_distinct_keys_are_no_duplicates(tmp_path):
    # More quotation marks than usual: in names, in fields that the format does not know, and in metadata.
    header = {
        "__metadata__": {"format": "pt", 'a "quoted" key': '{"json": "inside"}'},
        'say "hi"': entry("U8", [1], 0, 1) | {"note": "more"},
        '"': entry("U8", [1], 1, 2),
    }
    checkpoint = Checkpoint.open(write_header(tmp_path / "x.safetensors", header, b"ab"))
    assert list(checkpoint.tensors) == ['say "hi"', '"']
    assert checkpoint.metadata == header["__metadata__"]


@pytest.mark.parametrize(
    ("entries", "data", "words", "tensor"),
    [
        # Overlap, in whole and in part.
        ({"a": (8, 0, 8), "b": (8, 4, 12)}, 12, ["'a' and 'b' overlap by 4 bytes"], "b"),
        ({"a": (4, 0, 4), "b": (4, 0, 4)}, 4, ["'a' and 'b' overlap by 4 bytes"], "b"),
        ({"b": (4, 4, 8), "a": (8, 0, 8)}, 8, ["'a' and 'b' overlap by 4 bytes"], "b"),
        # Holes between tensors and before the first.
        ({"a": (4, 0, 4), "b": (4, 7, 11)}, 11, ["3 bytes after 'a'", "next is 'b'"], "b"),
        ({"a": (4, 5, 9)}, 9, ["5 bytes at the start of the data", "next is 'a'"], "a"),
        ({"a": (0, 2, 2)}, 2, ["2 bytes at the start of the data", "next is 'a'"], "a"),
        # More elements than bytes, and fewer.
        ({"a": (1_000_000, 0, 8)}, 8, ["'a'", "U8 [1000000] takes 1,000,000 bytes", "[0, 8] give it 8"], "a"),
        ({"a": (4, 0, 8)}, 8, ["'a'", "U8 [4] takes 4 bytes", "[0, 8] give it 8"], "a"),
        # Offsets that make no sense.
        ({"a": (4, 4, 0)}, 4, ["'a'", "[4, 0] run backwards"], "a"),
        ({"a": (4, -4, 0)}, 4, ["'a'", "[-4, 0]", "negative"], "a"),
    ],
)
def test_offsets_that_do_not_fit(tmp_path, entries, data, words, tensor):
    header = {name: entry("U8", [size], begin, end) for name, (size, begin, end) in entries.items()}
    error = refused(write_header(tmp_path / "x.safetensors", header, bytes(data)), *words)
    assert error.tensor == tensor


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (entry("F99", [1], 0, 4), ["unknown dtype 'F99'", "BF16", "installed torch"]),
        (entry("f32", [1], 0, 4), ["unknown dtype 'f32'"]),
        (entry(["F32"], [1], 0, 4), ["unknown dtype ['F32']"]),
        (entry(None, [1], 0, 4), ["unknown dtype None"]),
        (entry("F32", [1], 0, 4, 8), ["data_offsets [0, 4, 8] should be two numbers"]),
        (entry("F32", [1], 0), ["data_offsets [0] should be two numbers"]),
        (entry("F32", [1], 0, 4.0), ["data_offsets [0, 4.0] should be two numbers"]),
        (entry("F32", [1], False, 4), ["data_offsets [false, 4] should be two numbers"]),
        ({"dtype": "F32", "shape": [1], "data_offsets": "04"}, ['data_offsets "04" should be two numbers']),
        (entry("F32", [1.0], 0, 4), ["shape [1.0] is not a list of sizes"]),
        (entry("F32", [True], 0, 4), ["shape [true] is not a list of sizes"]),
        (entry("F32", [-1], 0, 4), ["shape [-1] is not a list of sizes"]),
        (entry("F32", [-1, -1], 0, 4), ["shape [-1, -1] is not a list of sizes"]),
        (entry("F32", 1, 0, 4), ["shape 1 is not a list of sizes"]),
        (entry("F32", None, 0, 4), ["shape null is not a list of sizes"]),
        # Empty things that are no lists would pass for the shape of a scalar.
        (entry("F32", {}, 0, 4), ["shape {} is not a list of sizes"]),
        (entry("F32", "", 0, 4), ['shape "" is not a list of sizes']),
        ({"dtype": "F32", "shape": [1]}, ["needs dtype, shape and data_offsets", '{"dtype": "F32", "shape": [1]}']),
        ([1, 2], ["needs dtype, shape and data_offsets", "[1, 2]"]),
        (None, ["needs dtype, shape and data_offsets", "null"]),
        ("text", ["needs dtype, shape and data_offsets", '"text"']),
    ],
)
def test_entries_that_say_something_odd(tmp_path, wrong, words):
    header = {"good": entry("F32", [1], 4, 8), "bad": wrong}
    error = refused(write_header(tmp_path / "x.safetensors", header, bytes(8)), "tensor 'bad'", *words)
    assert error.tensor == "bad"


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("[]", ["starts with b'['", "expected '{'"]),
        (' {"a": 1}', ["starts with b' '", "expected '{'"]),
        ("", ["starts with b''", "expected '{'"]),
        ('{"a": ', ["not valid JSON"]),
        ("{} x", ["not valid JSON"]),
        ('{"a": ' + "[" * 100_000, ["not valid JSON"]),
        ('{"a": {"dtype": "F32", "shape": [' + "9" * 5000 + '], "data_offsets": [0, 4]}}', ["not valid JSON"]),
        ('{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', ["not UTF-8"]),
        ('{"__metadata__": {"k": "\\uDFFF"}}', ["not UTF-8"]),
    ],
)
def test_headers_that_are_no_table(tmp_path, header, words):
    refused(write_header(tmp_path / "x.safetensors", header, bytes(4)), *words)


def test_a_header_in_another_encoding(tmp_path):
    header = '{"ä": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'.encode("latin-1")
    refused(write_raw(tmp_path / "x.safetensors", header, [b"a"]), "not UTF-8")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"format": 1}, ["__metadata__['format'] is 1", "expected a string"]),
        ({"format": None}, ["__metadata__['format'] is null"]),
        ({"format": {"a": "b"}}, ["__metadata__['format'] is an object"]),
        ({"format": ["pt"]}, ["__metadata__['format'] is a list"]),
        (["format"], ["__metadata__ is a list", "expected an object of strings"]),
        ("pt", ["__metadata__ is a string", "expected an object of strings"]),
    ],
)
def test_metadata_that_is_no_table_of_strings(tmp_path, metadata, words):
    refused(write_header(tmp_path / "x.safetensors", {"__metadata__": metadata}), *words)


def test_a_header_length_beyond_the_file(tmp_path):
    # What was the limit of the safetensors library, and one byte: only the length is there, nothing is allocated.
    path = write_raw(tmp_path / "x.safetensors", b"", length=100_000_001)
    refused(path, "header should take 100,000,001 bytes", "only 8 bytes in all")


def test_a_header_beyond_the_limit(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", b"{}", length=1 << 30)
    os.truncate(path, (1 << 30) + 8)  # sparse
    refused(path, "header takes 1,073,741,824 bytes", "limit of 536,870,912")


def test_a_header_above_the_old_limit_of_100_mb(tmp_path):
    tensors = {"a": torch.tensor([1.0, 2.0])}
    path = write_safetensors(tmp_path / "x.safetensors", tensors, pad=101_000_000)
    assert Checkpoint.open(path).tensors["a"].offset > 101_000_000
    assert_loads(path, tensors)


def test_the_reference_writer_agrees(tmp_path):
    # The library sorts by alignment and pads its header; what it writes must pass every check above.
    tensors = {"c": torch.ones(3, dtype=torch.uint8), "a": torch.tensor([2.0]), "b": torch.tensor([3, 4])}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path / "x.safetensors")
    assert checkpoint.metadata == {"format": "pt"}
    assert checkpoint.nbytes == 3 + 4 + 16
    assert_loads(checkpoint, tensors)
