"""Case 35: pointers, stumps and files that shrink are found before, or as, their bytes are used."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import streamload
from streamload import Checkpoint, LoadError, SourceError
from streamload.testing import module_of, write_raw, write_safetensors, write_sharded
from tests.checkpoint.tools import refused

_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4976698672\n".format("ab" * 32)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "pytorch_model.pt"])
def test_a_git_lfs_pointer(tmp_path, name):
    (tmp_path / name).write_text(_POINTER)
    refused(tmp_path / name, "Git LFS pointer", "4,976,698,672 bytes", "git lfs pull")


def test_a_git_lfs_pointer_among_shards(tmp_path):
    folder = write_sharded(tmp_path, {"s1.safetensors": {"a": torch.ones(1)}, "s2.safetensors": {"b": torch.ones(1)}})
    (tmp_path / "s2.safetensors").write_text(_POINTER)
    refused(folder, "Git LFS pointer", path=tmp_path / "s2.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_web_page_instead_of_weights(tmp_path, name):
    (tmp_path / name).write_text("\n<!DOCTYPE html><html><body>404 Not Found</body></html>")
    refused(tmp_path / name, "web page", "fetch the file again")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["the file is empty", "8 bytes of header length"]),
        (b"abc", ["has 3 bytes", "8 bytes of header length"]),
        ((1000).to_bytes(8, "little") + b"{}", ["header should take 1,000 bytes", "only 10 bytes in all"]),
        (
            (1 << 63).to_bytes(8, "little") + b"{}",
            ["header should take 9,223,372,036,854,775,808 bytes", "only 10 bytes"],
        ),
        ((6).to_bytes(8, "little") + b'{"a":{', ["not valid JSON"]),
    ],
)
def test_stumps(tmp_path, content, words):
    (tmp_path / "x.safetensors").write_bytes(content)
    refused(tmp_path / "x.safetensors", *words)


def test_other_formats_under_a_wrong_name_are_recognised(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "zip.safetensors")
    refused(tmp_path / "zip.safetensors", "zip archive", "torch.save", ".bin")
    (tmp_path / "gguf.safetensors").write_bytes(b"GGUF\3\0\0\0" + bytes(16))
    refused(tmp_path / "gguf.safetensors", "GGUF file", "not safetensors")


@pytest.mark.parametrize(
    ("cut", "first_short"),
    # b takes the last 8 bytes, a the 8 before them, and the empty c lies at the very end.
    [(1, "b"), (4, "b"), (8, "b"), (9, "a"), (15, "a"), (16, "a")],
)
def test_missing_data_names_the_first_short_tensor(tmp_path, cut, first_short):
    tensors = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(0)}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    full = os.path.getsize(path)
    os.truncate(path, full - cut)
    error = refused(path, f"expected {full} bytes", f"found {full - cut}", f"{cut} are missing", f"{first_short!r} on")
    assert error.tensor == first_short


def test_every_shard_is_measured_before_any_is_used(tmp_path):
    shards = {f"s{number}.safetensors": {f"t{number}": torch.full([4], float(number))} for number in range(5)}
    folder = write_sharded(tmp_path, shards)
    last = tmp_path / "s4.safetensors"
    os.truncate(last, os.path.getsize(last) - 4)
    module = module_of({f"t{number}": torch.zeros(4) for number in range(5)})

    with pytest.raises(streamload.CheckpointError, match=r"s4\.safetensors: .*4 are missing, from tensor 't4' on"):
        streamload.load(module, folder)

    assert all(not parameter.any() for parameter in module.parameters())  # the good shards were not read either


def test_no_shorter_length_gets_through(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(2), "b": torch.ones(2)})
    for length in reversed(range(os.path.getsize(path))):
        os.truncate(path, length)
        refused(path)


def _shrinking(tmp_path, name):
    tensors = {"first": torch.full([1000], 1.0), "last": torch.full([1000], 2.0)}
    path = tmp_path / name
    if name.endswith(".bin"):
        torch.save(tensors, path)
    else:
        write_safetensors(path, tensors)
    return path, module_of({key: torch.zeros(1000) for key in tensors})


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("short", ["first", "last"])
def test_a_file_that_shrinks_after_its_header_was_read(tmp_path, name, short):
    path, module = _shrinking(tmp_path, name)
    checkpoint = Checkpoint.open(path)
    spec = checkpoint.tensors[short]
    cut = spec.offset + spec.nbytes - 4
    os.truncate(path, cut)

    with pytest.raises(LoadError) as caught:
        streamload.load(module, checkpoint)

    message = str(caught.value)
    assert str(path) in message
    assert f"tensor {short!r}" in message
    assert f"ends at byte {cut:,}" in message
    assert f"data up to byte {checkpoint.tensors['last'].offset + 4000:,}" in message
    assert isinstance(caught.value.__cause__, SourceError)
    assert caught.value.__cause__.path == str(path)
    assert caught.value.report.bytes_wanted == 8000
    with pytest.raises(streamload.StreamloadError, match="partly loaded"):
        module()


def test_a_file_that_vanishes_after_its_header_was_read(tmp_path):
    path, module = _shrinking(tmp_path, "model.safetensors")
    checkpoint = Checkpoint.open(path)
    os.remove(path)
    with pytest.raises(LoadError, match=r"'first' .*model\.safetensors: cannot be opened: No such file"):
        streamload.load(module, checkpoint)


def test_a_loadable_module_is_loadable_again_after_a_failure(tmp_path):
    # A complete copy of the file arrives, and the same module takes it.
    path, module = _shrinking(tmp_path, "model.safetensors")
    checkpoint = Checkpoint.open(path)
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 1)
    with pytest.raises(LoadError):
        streamload.load(module, checkpoint)
    path.write_bytes(whole)
    with pytest.raises(LoadError, match=r"replaced or changed since its header was read.*open the checkpoint again"):
        streamload.load(module, checkpoint)
    streamload.load(module, path)
    assert torch.equal(module.first, torch.full([1000], 1.0))
    assert torch.equal(module.last, torch.full([1000], 2.0))


def test_a_linear_layer_from_a_short_file_stays_as_it_was(tmp_path):
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    path = write_safetensors(tmp_path / "x.safetensors", {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    os.truncate(path, os.path.getsize(path) - 1)
    with pytest.raises(streamload.CheckpointError, match="1 are missing, from tensor 'bias' on"):
        streamload.load(layer, path)
    assert torch.equal(layer.weight, before)


def test_a_length_field_alone(tmp_path):
    refused(write_raw(tmp_path / "x.safetensors", b"", length=2), "header should take 2 bytes", "only 8 bytes in all")
