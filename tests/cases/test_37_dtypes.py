"""Case 37: every dtype and every odd shape arrives bit for bit, wherever its bytes lie in the file."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import save_file

import streamload
from streamload import Checkpoint, LoadError
from streamload.testing import module_of, tensor_bytes, write_safetensors
from tests.checkpoint.tools import CODES, assert_loads, entry, filled, patterned, refused, write_header

SHAPES = [(), (0,), (0, 4), (2, 0), (1,), (2, 4), (3, 1, 2)]

dtypes = pytest.mark.parametrize("dtype", CODES, ids=CODES.values())


def _of(dtype):
    """One tensor for each shape. F4 cannot store a scalar: half a byte."""
    shapes = [shape for shape in SHAPES if shape or CODES[dtype] != "F4"]
    return {f"shape{'x'.join(map(str, shape))}": patterned(dtype, shape, 1 + 40 * n) for n, shape in enumerate(shapes)}


def _write(path, tensors, pad=0):
    if os.fspath(path).endswith(".bin"):
        torch.save(tensors, path)
    else:
        write_safetensors(path, tensors, pad=pad)
    return path


@dtypes
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_every_shape_of_every_dtype(tmp_path, dtype, name):
    tensors = _of(dtype)
    checkpoint = Checkpoint.open(_write(tmp_path / name, tensors))
    for key, tensor in tensors.items():
        spec = checkpoint.tensors[key]
        packed = 2 if CODES[dtype] == "F4" and tensor.dim() else 1
        assert spec.dtype == CODES[dtype]
        assert spec.shape == (*tensor.shape[:-1], *(size * packed for size in tensor.shape[-1:]))
        assert spec.nbytes == tensor.numel() * dtype.itemsize
        assert spec.numel == tensor.numel() * packed
    assert_loads(checkpoint, tensors)


@dtypes
def test_data_at_any_alignment(tmp_path, dtype):
    # Spaces in the header put the data at addresses that no typed view would accept.
    tensors = _of(dtype)
    starts = set()
    for pad in range(max(2, dtype.itemsize)):
        path = _write(tmp_path / f"{pad}.safetensors", tensors, pad)
        starts |= {spec.offset % dtype.itemsize for spec in Checkpoint.open(path).tensors.values()}
        assert_loads(path, tensors)
    assert starts == set(range(dtype.itemsize))


@pytest.mark.parametrize("dtype", [dtype for dtype, code in CODES.items() if code != "C128"])  # which it lacks
def test_what_the_safetensors_library_writes(tmp_path, dtype):
    tensors = _of(dtype)
    try:
        save_file(tensors, tmp_path / "model.safetensors")
    except (KeyError, ValueError, RuntimeError) as error:  # an older safetensors does not know the newest dtypes
        pytest.skip(f"safetensors {version('safetensors')} cannot write {dtype}: {error}")
    assert {spec.dtype for spec in Checkpoint.open(tmp_path).tensors.values()} == {CODES[dtype]}
    assert_loads(tmp_path, tensors)


@pytest.mark.parametrize("dtype", [dtype for dtype, code in CODES.items() if code != "F4"])
def test_into_a_target_that_is_no_contiguous_memory(tmp_path, dtype):
    # These are not read in place, so the bytes take the other way: through a window, by a copy of that dtype.
    tensor = patterned(dtype, [3, 4])
    module = module_of({"a": filled(patterned(dtype, [4, 3])).t()})
    assert not module.a.is_contiguous()
    streamload.load(module, write_safetensors(tmp_path / "x.safetensors", {"a": tensor}))
    assert tensor_bytes(module.a) == tensor_bytes(tensor)


def test_f32_right_after_three_bytes(tmp_path):
    tensors = {"u8": torch.tensor([1, 2, 3], dtype=torch.uint8), "f32": torch.tensor([1.5, -2.5])}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    specs = Checkpoint.open(path).tensors
    assert specs["f32"].offset == specs["u8"].offset + 3
    report = assert_loads(path, tensors)
    assert report.bytes_wanted == 11
    assert (report.clones, report.clone_bytes) == (0, 0)


def test_all_dtypes_in_one_file_in_any_order(tmp_path):
    tensors = {f"{code}{shape}": patterned(dtype, shape) for dtype, code in CODES.items() for shape in ((1,), (5,))}
    for number, names in enumerate([sorted(tensors), sorted(tensors, reverse=True)]):
        path = write_safetensors(tmp_path / f"{number}.safetensors", {name: tensors[name] for name in names})
        assert list(Checkpoint.open(path).tensors) == names
        assert_loads(path, tensors)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_values_that_arithmetic_would_change(tmp_path, name):
    # Signalling and negative NaNs, negative zeros, denormals: only a copy of bytes keeps them.
    bits = torch.tensor([0x7F800001, -0x003FFFFF, -0x80000000, 0x00000001, 0x7FC12345], dtype=torch.int32)
    half = torch.tensor([0x7C01, -0x03FF, -0x8000, 0x0001], dtype=torch.int16)
    tensors = {
        "f32": bits.view(torch.float32),
        "f16": half.view(torch.float16),
        "bf16": torch.tensor([0x7F81, -0x007F, -0x8000, 0x0001], dtype=torch.int16).view(torch.bfloat16),
        "f8": torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn),
        "e5m2": torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e5m2),
        "u64": torch.tensor([-1, 1 << 62], dtype=torch.int64).view(torch.uint64),
    }
    assert_loads(_write(tmp_path / name, tensors), tensors)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_names_that_are_not_ascii(tmp_path, name):
    tensors = {"größe.權重": torch.tensor([1.0]), "层.0.вес": torch.tensor([2.0]), "🦙": torch.tensor([3.0])}
    path = _write(tmp_path / name, tensors)
    assert Checkpoint.open(path).tensors.keys() == tensors.keys()
    assert_loads(path, tensors)


def test_names_that_are_not_ascii_unescaped(tmp_path):
    # JSON may hold them as they are or as escapes; our writer escapes, the library does not.
    tensors = {"größe.權重": torch.tensor([1.0]), "🦙": torch.tensor([3.0])}
    save_file(tensors, tmp_path / "x.safetensors")
    assert "🦙".encode() in (tmp_path / "x.safetensors").read_bytes()
    assert_loads(tmp_path / "x.safetensors", tensors)


def test_folders_and_files_that_are_not_ascii(tmp_path):
    folder = tmp_path / "模型 größe"
    folder.mkdir()
    tensors = {"a": torch.tensor([1.0, 2.0])}
    for name in ("gewicht-ä.safetensors", "gewicht-ä.bin"):
        assert_loads(_write(folder / name, tensors), tensors)


def test_only_empty_tensors(tmp_path):
    # Nothing to read at all: some checkpoints use such tensors as flags.
    tensors = {"flag": torch.ones(0), "other": torch.ones(3, 0, dtype=torch.int8)}
    report = assert_loads(write_safetensors(tmp_path / "x.safetensors", tensors), tensors)
    assert (report.bytes_read, report.bytes_wanted) == (0, 0)


def test_an_empty_tensor_of_another_shape_is_still_a_mismatch(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(0, 4)})
    with pytest.raises(LoadError, match=r"a: expected shape \[0, 5\], found shape \[0, 4\]"):
        streamload.load(module_of({"a": torch.ones(0, 5)}), path)


def test_an_unknown_dtype_names_everything_one_needs(tmp_path):
    path = write_header(tmp_path / "x.safetensors", {"layer.weight": entry("F3_E1M1", [8], 0, 3)}, b"abc")
    error = refused(path, "'layer.weight'", "unknown dtype 'F3_E1M1'", f"installed torch: {version('torch')}")
    assert error.tensor == "layer.weight"


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "words"),
    [
        ("F4", [2, 3], 3, ["F4 packs two elements", "last dimension of [2, 3] is odd"]),
        ("F4", [1], 1, ["last dimension of [1] is odd"]),
        ("F4", [], 1, ["F4 [] takes 4 bits", "no whole number of bytes"]),
        ("F6_E2M3", [3], 2, ["F6_E2M3 [3] takes 18 bits", "no whole number of bytes"]),
        ("F4", [2, 8], 16, ["F4 [2, 8] takes 8 bytes", "give it 16"]),
    ],
)
def test_packed_dtypes_whose_bytes_do_not_come_out_even(tmp_path, dtype, shape, nbytes, words):
    path = write_header(tmp_path / "x.safetensors", {"a": entry(dtype, shape, 0, nbytes)}, bytes(nbytes))
    assert refused(path, "tensor 'a'", *words).tensor == "a"


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2"])
def test_dtypes_of_the_format_that_torch_lacks_are_catalogued(tmp_path, code):
    path = write_header(tmp_path / "x.safetensors", {"a": entry(code, [2, 4], 0, 6)}, bytes(6))
    spec = Checkpoint.open(path).tensors["a"]
    assert (spec.dtype, spec.shape, spec.nbytes, spec.numel) == (code, (2, 4), 6, 8)
    assert streamload.plan({"a": (code, (2, 4))}, path).ok
    # A module cannot have such a parameter, and bytes are not quietly taken for something else.
    with pytest.raises(LoadError, match=f"a: expected U8, found {code}"):
        streamload.load(module_of({"a": torch.zeros(2, 4, dtype=torch.uint8)}), path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_element_with_and_without_a_dimension(tmp_path, name, shape):
    # The one pair of shapes that converts, and the report says so.
    stored = torch.full(shape, 7.0)
    module = module_of({"a": torch.zeros((1,) if shape == () else ())})
    report = streamload.load(module, _write(tmp_path / name, {"a": stored}))
    assert module.a.item() == 7.0
    assert module.a.shape != stored.shape
    assert any(note.startswith("a: one element") for note in report.notes)
