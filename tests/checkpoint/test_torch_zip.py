"""Files of ``torch.save``, as torch really writes them: read like ``torch.load(weights_only=True)``, but without running them."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections import OrderedDict

import pytest
import torch
from torch import nn

import streamload
from streamload import Checkpoint, CheckpointError
from streamload.testing import module_of, tensor_bytes
from tests.checkpoint.tools import CODES, assert_loads, filled, patterned, refused


def _save(path, content, **options):
    torch.save(content, path, **options)
    return path


def _assert_as_torch(path, entry=None):
    """Load ``path`` with both and compare bit for bit."""
    stored = torch.load(path, weights_only=True)
    stored = stored if entry is None else stored[entry]
    tensors = {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}
    checkpoint = Checkpoint.open(path)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        spec = checkpoint.tensors[name]
        assert spec.dtype == CODES[tensor.dtype]
        assert spec.nbytes == tensor.numel() * tensor.element_size()
        assert spec.strides == (None if tensor.is_contiguous() else tensor.stride())
    return assert_loads(checkpoint, {name: tensor.detach() for name, tensor in tensors.items()})


def test_the_state_dict_of_a_module(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model(torch.randn(8, 3, 3, 3))  # so that the running statistics differ from a new module's
    path = _save(tmp_path / "pytorch_model.bin", model.state_dict())
    _assert_as_torch(path)

    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    report = streamload.load(other, path)
    assert report.ok
    assert other[1].num_batches_tracked.shape == ()
    assert other[1].num_batches_tracked.item() == 1
    for name, tensor in model.state_dict().items():
        assert tensor_bytes(other.state_dict()[name]) == tensor_bytes(tensor)


def test_every_field_of_a_spec(tmp_path):
    path = _save(tmp_path / "m.bin", {"w": patterned(torch.bfloat16, [2, 3]), "b": patterned(torch.float32, [3], 50)})
    specs = Checkpoint.open(path).tensors
    assert [(s.name, s.dtype, s.shape, s.file, s.nbytes, s.strides) for s in specs.values()] == [
        ("w", "BF16", (2, 3), str(path), 12, None),
        ("b", "F32", (3,), str(path), 12, None),
    ]
    content = path.read_bytes()
    assert content[specs["w"].offset :][:12] == bytes(range(1, 13))
    assert content[specs["b"].offset :][:12] == bytes(range(50, 62))


_BASE = torch.arange(24.0).reshape(2, 3, 4)

_VIEWS = {
    "whole": _BASE,
    "transposed": _BASE.transpose(0, 2),
    "permuted": _BASE.permute(1, 2, 0),
    "rows": _BASE[1],
    "columns": _BASE[:, :, 1:3],
    "stepped": _BASE[:, ::2, ::3],
    "one": _BASE[1, 2, 3],
    "nothing": _BASE[:, 3:],
    "late nothing": _BASE[2:, :, 1:],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "expanded from one": torch.tensor(7.0).expand(3, 2),
    "overlapping": torch.arange(6.0).as_strided([3, 3], [1, 1], 1),
    "channels last": torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "size one with any stride": torch.arange(6.0).as_strided([1, 3], [17, 2]),
    "row-major by another stride": torch.arange(6.0).as_strided([1, 6], [99, 1]),
}


@pytest.mark.parametrize("name", _VIEWS)
def test_views(tmp_path, name):
    _assert_as_torch(_save(tmp_path / "m.bin", {"a": _VIEWS[name]}))


def test_views_of_shared_storages(tmp_path):
    # Stored once, read for each: the bytes wanted are those of the tensors, not of the storages.
    path = _save(tmp_path / "m.bin", _VIEWS)
    assert sum(name.filename.split("/")[1] == "data" for name in zipfile.ZipFile(path).infolist()) == 7
    _assert_as_torch(path)


def test_a_small_slice_of_a_large_storage(tmp_path):
    large = torch.arange(100_000.0)
    path = _save(tmp_path / "m.bin", {"a": large[70_000:70_003], "b": large[5:8]})
    report = _assert_as_torch(path)
    assert list(Checkpoint.open(path).tensors) == ["b", "a"]  # in file order
    assert report.bytes_wanted == 24
    assert report.bytes_read < 100_000  # blocks, not the storage


def test_tied_weights(tmp_path):
    # One storage under two names, into a module that ties them too and into one that does not.
    weight = patterned(torch.float32, [4, 3])
    path = _save(tmp_path / "m.bin", {"embed.weight": weight, "head.weight": weight})
    _assert_as_torch(path)
    tied = module_of({"embed.weight": torch.zeros(4, 3), "head.weight": torch.zeros(4, 3)})
    tied.head.weight = tied.embed.weight
    report = streamload.load(tied, path)
    assert report.tied == {"head.weight": "embed.weight"}
    assert report.bytes_wanted == 48
    assert torch.equal(tied.embed.weight, weight)
    assert tied.head.weight is tied.embed.weight


@pytest.mark.parametrize("dtype", CODES, ids=CODES.values())
def test_strided_tensors_of_every_dtype(tmp_path, dtype):
    base = patterned(dtype, [4, 6])
    views = {"whole": base, "rows": base[1:3]}
    if CODES[dtype] != "F4":
        views |= {
            "transposed": base.t(),
            "columns": base[:, 1:4],
            "stepped": base[::2, ::3],
            "expanded": base[:1].expand(3, 6),
        }
    _save(tmp_path / "m.bin", views)
    checkpoint = Checkpoint.open(tmp_path / "m.bin")
    assert {spec.dtype for spec in checkpoint.tensors.values()} == {CODES[dtype]}
    # torch.load gives float8 and unsigned views too, but some of them cannot be made contiguous by every torch: carry bytes.
    stored = torch.load(tmp_path / "m.bin", weights_only=True)
    for name, view in views.items():
        assert stored[name].stride() == view.stride()
        module = module_of({"a": filled(patterned(dtype, view.shape, 77))})
        report = streamload.load(module, checkpoint, mapper=lambda each, name=name: "a" if each == name else None)
        assert report.bytes_wanted == view.numel() * dtype.itemsize
        assert tensor_bytes(module.a) == tensor_bytes(stored[name])


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
@pytest.mark.parametrize("pick", [lambda each: each[:, :1], lambda each: each[0, 0]])
def test_views_of_packed_elements(tmp_path, pick):
    tensor = pick(patterned(torch.float4_e2m1fn_x2, [2, 4]))
    error = refused(_save(tmp_path / "m.bin", {"a": tensor}), "tensor 'a'", "F4 view", "contiguous copy")
    assert error.tensor == "a"


def test_parameters(tmp_path):
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    frozen = nn.Parameter(torch.arange(4), requires_grad=False)
    annotated = nn.Parameter(torch.ones(2))
    annotated.role = "bias"  # saved with its state
    attribute = torch.ones(3)
    attribute.role = "buffer"
    content = {"weight": weight, "view": weight.detach().t(), "frozen": frozen, "annotated": annotated}
    path = _save(tmp_path / "m.bin", content | {"attribute": attribute})
    _assert_as_torch(path)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_kinds_of_dictionaries(tmp_path, kind):
    _assert_as_torch(_save(tmp_path / "m.bin", kind(b=torch.ones(2), a=torch.zeros(3))))


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model", "module"])
def test_weights_inside_a_training_checkpoint(tmp_path, wrapper):
    weights = nn.Linear(2, 3).state_dict()
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(6)}}, "param_groups": [{"lr": 0.1}]}
    # A tensor beside the weights, such as the best accuracy so far, is not the model.
    content = {
        "epoch": 3,
        wrapper: weights,
        "optimizer": optimizer,
        "best": torch.tensor(0.5),
        "name": "x",
        "none": None,
    }
    path = _save(tmp_path / "m.pt", content)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.tensors.keys() == {"weight", "bias"}
    assert checkpoint.nbytes == 36
    note = checkpoint.notes[0]
    assert note.startswith(f"{path}: weights taken from its entry {wrapper!r}")
    for beside in ("'epoch'", "'optimizer'", "'best'", "'name'"):
        assert beside in note
    _assert_as_torch(path, wrapper)


def test_a_wrapper_inside_a_wrapper(tmp_path):
    path = _save(tmp_path / "m.pt", {"model": {"state_dict": {"a": torch.tensor([1.0])}, "version": 2}})
    assert_loads(path, {"a": torch.tensor([1.0])})
    assert len([note for note in Checkpoint.open(path).notes if "weights taken from" in note]) == 2


def test_a_module_whose_names_look_like_wrappers(tmp_path):
    # Only an entry that holds tensors is a wrapper; these are tensors themselves, or settings.
    path = _save(
        tmp_path / "m.pt", {"model": torch.tensor([1.0]), "module": torch.tensor([2.0]), "state_dict": {"v": 1}}
    )
    assert_loads(path, {"model": torch.tensor([1.0]), "module": torch.tensor([2.0])})


def test_two_wrappers_in_one_file(tmp_path):
    content = {"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.zeros(1)}}
    refused(_save(tmp_path / "m.pt", content), "several entries", "'state_dict'", "'model'")


def test_entries_beside_the_tensors_are_noted(tmp_path):
    content = {"a": torch.tensor([1.0]), "config": {"x": 1}, "layers": [1, 2], "version": 3, "size": torch.Size([4])}
    path = _save(
        tmp_path / "m.pt", content | {"dtype": torch.float16, "device": torch.device("cpu"), "text": "y" * 100}
    )
    notes = [note for note in Checkpoint.open(path).notes if "passed over" in note]
    assert len(notes) == 7
    for name, kind in {"config": "a dict", "layers": "a list", "version": "3", "size": "a tuple"}.items():
        assert f"{path}: entry {name!r} is {kind}, no tensor; passed over" in notes
    assert max(map(len, notes)) < len(str(path)) + 100
    assert_loads(path, {"a": torch.tensor([1.0])})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(1)], ["holds a list", "expected a state_dict"]),
        (torch.ones(1), ["holds a single tensor", "expected a state_dict"]),
        (3, ["holds 3", "expected a state_dict"]),
        ({"epoch": 1, "args": {}}, ["no tensors at its top level", "'epoch', 'args'"]),
        ({"encoder": {"w": torch.ones(1)}}, ["no tensors at its top level", "'encoder'"]),
        ({1: torch.ones(1)}, ["stored under the key 1", "expected a name"]),
        ({("a", "b"): torch.ones(1)}, ["stored under the key ('a', 'b')"]),
    ],
)
def test_what_is_no_state_dict(tmp_path, content, words):
    refused(_save(tmp_path / "m.pt", content), *words)


def test_no_tensors_at_all(tmp_path):
    assert Checkpoint.open(_save(tmp_path / "m.pt", {})).tensors == {}


def test_a_dictionary_inside_itself(tmp_path):
    content = {"epoch": 1}
    content["model"] = content
    refused(_save(tmp_path / "m.pt", content), "no tensors at its top level", "'epoch', 'model'")
    content["a"] = torch.ones(2)
    assert list(Checkpoint.open(_save(tmp_path / "m.pt", content)).tensors) == ["a"]


class _Runs:
    """Unpickling this calls a function with arguments of the file's choice."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class _Custom:
    """Unpickling this imports a module of the file's choice, and sets attributes."""

    def __init__(self):
        self.value = 1


_BEEN = []


def _leave_a_trace(*arguments):
    _BEEN.append(arguments)


@pytest.mark.parametrize(
    ("content", "needs"),
    [
        (_Runs(os.system, "touch {marker}"), f"{os.name}.system"),
        (_Runs(exec, "open({marker!r}, 'w')"), "__builtin__.exec"),
        (_Runs(eval, "open({marker!r}, 'w')"), "__builtin__.eval"),
        (_Runs(getattr, "x", "upper"), "__builtin__.getattr"),
        (_Runs(_leave_a_trace, 1), f"{__name__}._leave_a_trace"),
        (_Runs(torch.load, "{marker}"), "torch.serialization.load"),
        (_Custom(), f"{__name__}._Custom"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (zipfile.ZipInfo("a"), "zipfile.ZipInfo"),
    ],
)
@pytest.mark.parametrize("where", ["value", "key of a wrapper", "the whole"])
def test_a_pickle_that_needs_more_is_refused_and_not_run(tmp_path, content, needs, where):
    marker = tmp_path / "marker"
    if isinstance(content, _Runs):
        function, arguments = content.call
        content = _Runs(
            function, *(each.format(marker=str(marker)) if type(each) is str else each for each in arguments)
        )
    weights = {"a": torch.ones(1)}
    whole = {"value": weights | {"b": content}, "key of a wrapper": {"state_dict": weights, "args": content}}
    path = _save(tmp_path / "m.bin", whole.get(where, content))

    refused(path, f"the pickle needs {needs}", "refused", "could run code")
    module = module_of({"a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="could run code"):
        streamload.load(module, path, strict=False)

    assert not marker.exists()
    assert _BEEN == []
    assert module.a.item() == 0.0


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (lambda: torch.eye(3).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (lambda: torch.ones(3, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage"),
        (lambda: torch.ones(3, dtype=torch.complex32), "torch.complex32"),
        (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "torch.bits8"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_kinds_of_tensors_that_are_not_read(tmp_path, make, needs):
    error = refused(_save(tmp_path / "m.bin", {"a": make()}), f"needs {needs}", "cannot be read in pieces")
    assert "could run code" not in str(error)


@pytest.mark.parametrize(
    ("make", "bits"),
    [
        # torch conjugates and negates lazily, and saves a flag with the untouched bytes.
        (lambda: torch.tensor([1 + 2j]).conj(), "conj"),
        (lambda: torch.tensor([1 + 2j]).conj().imag, "neg"),
        (lambda: torch._neg_view(torch.tensor([1 + 2j]).conj()), "neg and conj"),
    ],
)
def test_values_that_torch_has_yet_to_change(tmp_path, make, bits):
    path = _save(tmp_path / "m.bin", {"a": make()})
    error = refused(path, "tensor 'a'", f"{bits} bit", "resolve_conj().resolve_neg()")
    assert error.tensor == "a"
    resolved = make().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert torch.equal(torch.load(path, weights_only=True)["a"], resolved)
    assert_loads(_save(path, {"a": resolved}), {"a": resolved})


def test_the_format_of_before_1_6(tmp_path):
    path = _save(tmp_path / "m.bin", {"a": torch.ones(1)}, _use_new_zipfile_serialization=False)
    refused(path, "old format", "torch.save(torch.load(path, weights_only=True), path)")
    torch.save(torch.load(path, weights_only=True), path)  # as the message says
    assert_loads(path, {"a": torch.ones(1)})


def test_files_that_are_no_archive(tmp_path):
    path = tmp_path / "m.bin"
    for content, words in {
        b"": "the file is empty",
        b"hello world": "starts with b'hello wo'",
        pickle.dumps({"a": 1}): "old format",
    }.items():
        path.write_bytes(content)
        refused(path, words)
    refused(tmp_path / "none.bin", "no such file")


def test_every_shorter_length_is_an_error(tmp_path):
    path = _save(tmp_path / "m.bin", {"a": torch.ones(5), "b": torch.ones(2)})
    whole = path.read_bytes()
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        refused(path)
    path.write_bytes(whole[:-1])
    refused(path, "zip archive is damaged or cut short", "interrupted")


def _rewrite(path, change, packed=None):
    """Write the archive again with ``change(short name, bytes)`` in place of each record; ``None`` leaves it out.

    ``packed`` is the short name of a record to compress.
    """
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            new = change(name.partition("/")[2], content)
            if new is not None:
                kind = zipfile.ZIP_DEFLATED if name.partition("/")[2] == packed else zipfile.ZIP_STORED
                archive.writestr(name, new, kind)
    return path


@pytest.fixture
def saved(tmp_path):
    return _save(tmp_path / "m.bin", {"a": torch.arange(100.0), "b": torch.ones(2)})


def test_an_archive_that_another_tool_packed_again(saved):
    # Records are not aligned any more, and their local headers are of another length.
    _rewrite(saved, lambda name, content: content)
    assert Checkpoint.open(saved).tensors["a"].offset % 64
    assert_loads(saved, {"a": torch.arange(100.0), "b": torch.ones(2)})


@pytest.mark.parametrize("packed", ["data.pkl", "data/0"])
def test_a_compressed_archive(saved, packed):
    # Also where that is only the pickle, which could unpack to any size.
    refused(_rewrite(saved, lambda name, content: content, packed), "archive is compressed")


def test_a_missing_record(saved):
    error = refused(
        _rewrite(saved, lambda name, content: None if name == "data/1" else content), "'b'", "data/1", "missing"
    )
    assert error.tensor == "b"


def test_a_record_that_is_too_short(saved):
    short = _rewrite(saved, lambda name, content: content[:-4] if name == "data/0" else content)
    error = refused(short, "tensor 'a' reaches past its storage of 396 bytes")
    assert error.tensor == "a"


@pytest.mark.parametrize("order", [b"big", b""])
def test_a_big_endian_file(saved, order):
    refused(
        _rewrite(saved, lambda name, content: order if name == "byteorder" else content),
        "not written on a little-endian machine",
    )


def test_a_file_without_a_byte_order(saved):
    # As torch wrote it before 2.1.
    _rewrite(saved, lambda name, content: None if name == "byteorder" else content)
    assert_loads(saved, {"a": torch.arange(100.0), "b": torch.ones(2)})


def test_no_pickle_and_two(saved, tmp_path):
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("other/data.pkl", b"")
    refused(saved, "expected one data.pkl", "found 2")
    with zipfile.ZipFile(tmp_path / "n.bin", "w") as archive:
        archive.writestr("hello.txt", "hello")
    refused(tmp_path / "n.bin", "expected one data.pkl", "found 0")


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (b"", ["data.pkl is damaged", "exhausted"]),
        (pickle.dumps({"a": 1}, 2)[:-1], ["data.pkl is damaged"]),
        (b"\x80\x63.", ["data.pkl is damaged", "protocol"]),  # there is no protocol 99
        (b"\x80\x02K\x01Q.", ["data.pkl is damaged"]),  # a persistent id that is a number
        (b"cos\nsystem\n", ["data.pkl is damaged", "exhausted"]),  # it breaks off after an import
        # Numbers for which Python's unpickler would take gigabytes, in both spellings.
        (b"\x80\x02}r\xff\xff\xff\xff.", ["data.pkl is damaged", "memo number 4,294,967,295 in a pickle of 9 bytes"]),
        (b"\x80\x02}p99999999999\n.", ["data.pkl is damaged", "memo number 99,999,999,999"]),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", ["needs os.system", "could run code"]),
        (b"\x80\x02\x82\x01.", ["data.pkl is damaged", "extension"]),  # copyreg's registry
    ],
)
def test_a_damaged_pickle(saved, pickled, words):
    refused(_rewrite(saved, lambda name, content: pickled if name == "data.pkl" else content), *words)


def _hand_made(path, storage, rebuild):
    """A file with one tensor ``a``, whose pickle holds these arguments, and four bytes of data."""
    pickled = b"\x80\x02}X\x01\x00\x00\x00a"
    pickled += b"ctorch._utils\n_rebuild_tensor_v2\n((" + storage + b"tQ" + rebuild + b"tRs."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", b"abcd")
    return path


_STORAGE = b"X\x07\x00\x00\x00storagectorch\nByteStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04"
_OFFSET, _SHAPE, _STRIDE, _REST = b"K\x00", b"K\x04\x85", b"K\x01\x85", b"\x89N"


def test_a_hand_made_file(tmp_path):
    # So that the ones below fail for their fault alone.
    path = _hand_made(tmp_path / "m.bin", _STORAGE, _OFFSET + _SHAPE + _STRIDE + _REST)
    tensors = {"a": torch.tensor(list(b"abcd"), dtype=torch.uint8)}
    assert torch.equal(torch.load(path, weights_only=True)["a"], tensors["a"])
    assert_loads(path, tensors)


@pytest.mark.parametrize(
    ("storage", "rebuild", "words"),
    [
        (_STORAGE, b"K\x01" + _SHAPE + _STRIDE + _REST, ["'a' reaches past its storage of 4 bytes"]),
        (_STORAGE, _OFFSET + b"K\x05\x85" + _STRIDE + _REST, ["'a' reaches past its storage"]),
        (_STORAGE, _OFFSET + _SHAPE + b"K\x02\x85" + _REST, ["'a' reaches past its storage"]),
        (_STORAGE, b"J\xff\xff\xff\xff" + _SHAPE + _STRIDE + _REST, ["damaged", "sizes and strides (-1, 4, 1)"]),
        (_STORAGE, _OFFSET + b"J\xfc\xff\xff\xff\x85" + _STRIDE + _REST, ["damaged", "(0, -4, 1)"]),
        (_STORAGE, _OFFSET + _SHAPE + b"J\xff\xff\xff\xff\x85" + _REST, ["damaged", "(0, 4, -1)"]),
        (_STORAGE, _OFFSET + b"K\x02K\x02\x86" + _STRIDE + _REST, ["damaged", "without storage, dtype or strides"]),
        (_STORAGE, _OFFSET + b"\x88\x85" + _STRIDE + _REST, ["damaged", "(0, True, 1)"]),
        (_STORAGE, _OFFSET + b"X\x01\x00\x00\x00x\x85" + _STRIDE + _REST, ["damaged", "(0, 'x', 1)"]),
        # A key that is no text, a storage of another kind, an id with too few parts.
        (
            _STORAGE.replace(b"X\x01\x00\x00\x000", b"]"),
            _OFFSET + _SHAPE + _STRIDE + _REST,
            ["damaged", "'storage', []"],
        ),
        (_STORAGE.replace(b"storagec", b"storagfc"), _OFFSET + _SHAPE + _STRIDE + _REST, ["damaged", "'storagf'"]),
        (b"K\x01K\x02", _OFFSET + _SHAPE + _STRIDE + _REST, ["damaged", "unpack"]),
        (_STORAGE.replace(b"\x000X", b"\x009X"), _OFFSET + _SHAPE + _STRIDE + _REST, ["data/9, which is missing"]),
    ],
)
def test_descriptions_of_tensors_that_do_not_fit(tmp_path, storage, rebuild, words):
    refused(_hand_made(tmp_path / "m.bin", storage, rebuild), *words)


def test_a_directory_that_promises_more_than_the_file(tmp_path):
    path = _hand_made(tmp_path / "m.bin", _STORAGE, _OFFSET + b"M\xff\x00\x85" + _STRIDE + _REST)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\1\2")  # the directory's last entry is data/0; both of its sizes become 60,000
    content[entry + 20 : entry + 28] = (60_000).to_bytes(4, "little") * 2
    path.write_bytes(content)
    refused(path, "record of tensor 'a' should end at byte", f"the file has {len(content):,}")


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_an_error_or_harmless(tmp_path, seed):
    # Whatever bytes change, the answer is a catalog that fits into the file, or a CheckpointError that names it.
    base = torch.arange(12.0).reshape(3, 4)
    content = {"a": base, "b": base.t(), "c": nn.Parameter(torch.ones(2)), "d": torch.ones(2, dtype=torch.uint16)}
    path = _save(tmp_path / "m.bin", content)
    good = path.read_bytes()
    rng, errors = random.Random(seed), 0
    for _ in range(500):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(good))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            specs = Checkpoint.open(path).tensors.values()
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: ")
            errors += 1
        else:
            assert max((spec.offset + spec.span for spec in specs), default=0) <= len(good)
    assert errors > 250


def test_many_tensors(tmp_path):
    content = {f"layers.{n}.weight": torch.full([2], float(n)) for n in range(2000)}
    path = _save(tmp_path / "m.bin", content)
    assert list(Checkpoint.open(path).tensors) == list(content)
    report = assert_loads(path, content)
    assert report.bytes_wanted == 2000 * 8
