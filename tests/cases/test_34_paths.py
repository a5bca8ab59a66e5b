"""Case 34: an index cannot lead out of its folder, and the links of a Hugging Face cache still work."""

from __future__ import annotations

import os

import pytest
import torch

from streamload import Checkpoint
from streamload.testing import write_safetensors
from tests.checkpoint.tools import assert_loads, refused, write_index

INSIDE, OUTSIDE = torch.full([2], 1.0), torch.full([2], 2.0)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder with a neighbour that holds somebody else's tensor ``a``."""
    for name, value in {"mine": INSIDE, "other": OUTSIDE}.items():
        os.makedirs(tmp_path / name / "sub")
        write_safetensors(tmp_path / name / "m.safetensors", {"a": value})
        write_safetensors(tmp_path / name / "sub" / "m.safetensors", {"a": value})
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("../other/m.safetensors", "leaves the folder"),
        ("sub/../m.safetensors", "leaves the folder"),  # it would not, but no honest index needs it
        ("sub/../../other/m.safetensors", "leaves the folder"),
        ("..", "leaves the folder"),
        ("..\\other\\m.safetensors", "back-slash"),
        ("sub\\m.safetensors", "back-slash"),
        ("\\\\host\\share\\m.safetensors", "back-slash"),
        ("", "is empty"),
        ("  ", "is empty"),
        ("https://example.org/m.safetensors", "URL"),
        ("file:///etc/m.safetensors", "URL"),
        ("s3://bucket/m.safetensors", "URL"),
        ("C:m.safetensors", "drive"),
        ("m.safetensors\0.txt", "NUL character"),
        ("/", "absolute path"),
    ],
)
def test_refused_by_the_text_alone(folder, value, why):
    index = write_index(folder, {"weight_map": {"good": "m.safetensors", "a": value}})
    error = refused(folder, "tensor 'a'", repr(value), why, path=index)
    assert error.tensor == "a"


def test_an_absolute_path_is_refused_even_into_the_folder(folder):
    for target in (folder / "m.safetensors", folder.parent / "other" / "m.safetensors"):
        index = write_index(folder, {"weight_map": {"a": str(target)}})
        refused(folder, "tensor 'a'", repr(str(target)), "absolute path", path=index)


def test_it_is_refused_before_the_disk_is_touched(folder):
    # Were missing files looked for first, they would be the error.
    index = write_index(folder, {"weight_map": {"a": "missing.safetensors", "b": "../missing.safetensors"}})
    refused(folder, "'../missing.safetensors'", "leaves the folder", path=index)


@pytest.mark.parametrize("value", ["m.safetensors", "sub/m.safetensors", "./m.safetensors", "sub//m.safetensors"])
def test_names_below_the_folder_are_fine(folder, value):
    write_index(folder, {"weight_map": {"a": value}})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == (os.path.normpath(os.path.join(folder, value)),)
    assert_loads(checkpoint, {"a": INSIDE})


@pytest.fixture
def snapshot(tmp_path):
    """A snapshot as the Hugging Face cache lays it out: links to blobs whose names have no suffix."""
    cache = tmp_path / "models--org--name"
    folder = cache / "snapshots" / "0123abcd"
    os.makedirs(folder / "sub")
    os.makedirs(cache / "blobs")
    for number, (name, up) in enumerate({"m.safetensors": "../..", "sub/n.safetensors": "../../.."}.items()):
        write_safetensors(cache / "blobs" / f"{number:064x}", {f"t{number}": torch.full([2], 1.0 + number)})
        os.symlink(f"{up}/blobs/{number:064x}", folder / name)
    write_index(folder, {"weight_map": {"t0": "m.safetensors", "t1": "sub/n.safetensors"}})
    return folder


@pytest.mark.parametrize("confine", [False, True])
def test_links_of_a_hugging_face_cache(snapshot, confine):
    checkpoint = Checkpoint.open(snapshot, confine=confine)
    # The path as it was found, not the blob: its suffix says what it is.
    assert checkpoint.files == (str(snapshot / "m.safetensors"), str(snapshot / "sub" / "n.safetensors"))
    assert checkpoint.tensors["t1"].file == str(snapshot / "sub" / "n.safetensors")
    assert_loads(checkpoint, {"t0": torch.full([2], 1.0), "t1": torch.full([2], 2.0)})


@pytest.mark.parametrize("confine", [False, True])
def test_a_part_of_a_snapshot(snapshot, confine):
    checkpoint = Checkpoint.open(snapshot / "sub", confine=confine)
    assert list(checkpoint.tensors) == ["t1"]


def test_a_blob_that_is_gone(snapshot):
    os.remove(os.path.realpath(snapshot / "m.safetensors"))
    index = snapshot / "model.safetensors.index.json"
    refused(snapshot, "1 of the 2 shards", "m.safetensors", "download incomplete", path=index)
    os.remove(index)
    refused(snapshot, "cannot be read: No such file or directory", path=snapshot / "m.safetensors")


def test_a_link_that_leaves_the_folder(folder):
    os.remove(folder / "m.safetensors")
    os.symlink("../other/m.safetensors", folder / "m.safetensors")
    target = os.path.realpath(folder / "m.safetensors")
    for location in (folder, folder / "m.safetensors"):
        # Links are the user's own doing, so they are followed unless that is forbidden.
        assert_loads(location, {"a": OUTSIDE})
        refused(location, f"link to {target}", "confine=True", path=folder / "m.safetensors", confine=True)
    write_index(folder, {"weight_map": {"a": "m.safetensors"}})
    refused(folder, f"link to {target}", path=folder / "m.safetensors", confine=True)


def test_a_link_within_the_folder_is_confined(folder):
    os.remove(folder / "m.safetensors")
    os.symlink("sub/m.safetensors", folder / "m.safetensors")
    assert_loads(Checkpoint.open(folder, confine=True), {"a": INSIDE})


def test_a_link_into_another_models_blobs_is_not_confined(snapshot):
    foreign = snapshot.parents[2] / "models--org--other" / "blobs" / "ff"
    os.makedirs(foreign.parent)
    write_safetensors(foreign, {"t0": torch.zeros(2)})
    os.remove(snapshot / "m.safetensors")
    os.symlink(foreign, snapshot / "m.safetensors")
    refused(snapshot, f"link to {foreign}", path=snapshot / "m.safetensors", confine=True)


def test_a_link_to_what_is_no_checkpoint_shows_its_own_name(folder):
    # Not the target's: that may be a secret file, of which the message must not show more than its first bytes.
    secret = folder.parent / "secret.txt"
    secret.write_text("the root password is swordfish" * 20)
    os.remove(folder / "m.safetensors")
    os.symlink(secret, folder / "m.safetensors")
    error = refused(folder, path=folder / "m.safetensors")
    assert "swordfish" not in str(error)


def test_a_shard_that_is_a_folder(folder):
    index = {"weight_map": {"a": "sub"}}
    write_index(folder, index)
    refused(folder, "is a folder, expected a file of weights", path=folder / "sub")
