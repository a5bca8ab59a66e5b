"""Case 32: a name in two shards has one meaning, or is an error; it never depends on which file is read last."""

from __future__ import annotations

import pytest
import torch

from streamload import Checkpoint
from streamload.testing import write_safetensors
from tests.checkpoint.tools import assert_loads, refused, write_index

OLD, NEW, B = torch.zeros(2), torch.ones(2), torch.full([2], 5.0)


@pytest.fixture
def folder(tmp_path):
    """``a`` is in both shards, with different values."""
    write_safetensors(tmp_path / "s1.safetensors", {"a": OLD, "b": B})
    write_safetensors(tmp_path / "s2.safetensors", {"a": NEW})
    return tmp_path


@pytest.mark.parametrize(
    ("home", "value", "second"),
    [
        # The other copy is the first file's in one case and the last file's in the other.
        ("s2.safetensors", NEW, "s1.safetensors"),
        ("s1.safetensors", OLD, "s2.safetensors"),
    ],
)
def test_the_index_decides(folder, home, value, second):
    places = {"a": home, "b": "s1.safetensors"}
    if home == "s1.safetensors":
        write_safetensors(folder / "s2.safetensors", {"a": NEW, "c": B})
        places["c"] = "s2.safetensors"  # otherwise nothing would name s2
    write_index(folder, {"weight_map": places})

    checkpoint = Checkpoint.open(folder)

    assert checkpoint.tensors["a"].file == str(folder / home)
    assert [(spec.name, spec.file) for spec in checkpoint.skipped] == [("a", str(folder / second))]
    (note,) = checkpoint.notes
    assert f"1 second copies are not read, the index decides: a in {second}" in note
    wanted = {"a": value, "b": B, **({"c": B} if "c" in places else {})}
    assert checkpoint.nbytes == 8 * len(wanted)
    report = assert_loads(checkpoint, wanted)
    assert note in report.notes


def test_a_shard_that_the_index_does_not_name_is_not_read_at_all(folder):
    (folder / "s2.safetensors").write_bytes(b"rubbish")
    write_index(folder, {"weight_map": {"a": "s1.safetensors", "b": "s1.safetensors"}})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == (str(folder / "s1.safetensors"),)
    assert checkpoint.skipped == ()
    assert checkpoint.ignored["s2.safetensors"] == "the index model.safetensors.index.json decides"
    assert_loads(checkpoint, {"a": OLD, "b": B})


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2),  # even equal copies: nothing says that they are meant to be
        torch.ones(2),
        torch.ones(3),
        torch.ones(2, dtype=torch.bfloat16),
    ],
)
def test_without_an_index_it_is_an_error(folder, other):
    write_safetensors(folder / "s2.safetensors", {"a": other})
    first, second = folder / "s1.safetensors", folder / "s2.safetensors"
    error = refused(folder, "tensor 'a' is also in", first, "no index", path=second)
    assert error.tensor == "a"


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)])
def test_the_skipped_copy_may_have_another_shape_or_dtype(folder, other):
    write_safetensors(folder / "s2.safetensors", {"a": other})
    write_index(folder, {"weight_map": {"a": "s2.safetensors", "b": "s1.safetensors"}})
    assert_loads(folder, {"a": other, "b": B})


def test_a_damaged_shard_is_an_error_even_if_only_second_copies_are_in_it(folder):
    # The index names s2, so its header counts.
    write_index(folder, {"weight_map": {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"}})
    (folder / "s2.safetensors").write_bytes(b"rubbish")
    refused(folder, "has 7 bytes", path=folder / "s2.safetensors")
