"""Read and check the header of one safetensors file.

The format: 8 bytes of little-endian header length, a JSON object that maps names to ``dtype``, ``shape`` and
``data_offsets``, then the data, which the tensors cover without gap or overlap
(https://github.com/huggingface/safetensors#format). Everything that can be wrong with it has a message of its own here,
so that no other reader's wording reaches the user.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from importlib import metadata
from math import prod
from operator import attrgetter
from typing import Any, NoReturn

from streamload.checkpoint.dtypes import BITS
from streamload.checkpoint.spec import TensorSpec
from streamload.errors import CheckpointError

#: A header longer than this is refused: a million tensors take about 100 MB.
MAX_HEADER_BYTES = 512 * 1024 * 1024

#: As many dimensions as torch allows a tensor to have.
MAX_DIMENSIONS = 64

_LFS = b"version https://git-lfs.github.com/spec/"
_ONLY_INT = frozenset({int})


def check_regular(path: str) -> None:
    """Refuse what is no plain file; opening a pipe would wait for ever. What is not there is left to the reader."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if stat.S_ISDIR(mode):
        raise CheckpointError(f"{path}: is a folder, expected a file of weights", path=path)
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is a pipe, a socket or a device, expected a file of weights", path=path)


def read_header(path: str, *, allow_trailing: bool = False) -> tuple[list[TensorSpec], dict[str, str]]:
    """The tensors of the safetensors file ``path`` in file order, and its ``__metadata__``.

    Only the header is read. ``allow_trailing`` accepts bytes after the last tensor, which the format forbids.
    Raises CheckpointError for every way in which the file can be wrong.
    """
    raw, size = _read_raw(path)
    table = _parse(raw, path)
    stored = table.pop("__metadata__", None)
    specs = _specs(table, path, 8 + len(raw))
    specs.sort(key=attrgetter("offset", "nbytes"))
    _check_cover(specs, path, 8 + len(raw), size, allow_trailing)
    return specs, _metadata(stored, path)


def not_weights(head: bytes, path: str) -> str | None:
    """Why a file that begins with ``head`` holds no weights (a Git LFS pointer, a web page), or ``None``."""
    if head.startswith(_LFS):
        match = re.search(rb"^size (\d+)$", head, re.MULTILINE)
        stands = f" that stands for {int(match[1]):,} bytes" if match else ""
        return f"{path}: this is a Git LFS pointer{stands}, not the weights; run `git lfs pull` in that repository"
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"{path}: this is a web page, not weights; the download went wrong, fetch the file again"
    return None


def _read_raw(path: str) -> tuple[bytes, int]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(512)
            if reason := not_weights(head, path):
                raise CheckpointError(reason, path=path)
            if size < 8:
                found = "the file is empty" if not size else f"the file has {size} bytes"
                raise CheckpointError(
                    f"{path}: {found}, but a safetensors file starts with 8 bytes of header length; "
                    "was the download interrupted?",
                    path=path,
                )
            length = int.from_bytes(head[:8], "little")
            _check_length(head, length, size, path)
            return head[8 : 8 + length] + file.read(max(0, 8 + length - len(head))), size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error


def _check_length(head: bytes, length: int, size: int, path: str) -> None:
    if 8 + length <= size and length <= MAX_HEADER_BYTES:
        return
    if head.startswith(b"PK\x03\x04"):
        problem = (
            "this is a zip archive (torch.save writes such files), not safetensors; give it the ending .pt or .bin"
        )
    elif head.startswith(b"GGUF"):
        problem = "this is a GGUF file, not safetensors; convert it to safetensors first"
    elif 8 + length > size:
        problem = (
            f"the header should take {length:,} bytes, but the file has only {size:,} bytes in all; "
            "it is cut short or no safetensors file"
        )
    else:
        problem = f"the header takes {length:,} bytes, more than the limit of {MAX_HEADER_BYTES:,}"
    raise CheckpointError(f"{path}: {problem}", path=path)


def _parse(raw: bytes, path: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: the header starts with {raw[:1]!r}, expected '{{'", path=path)
    try:
        text = raw.decode("utf-8")
        table = json.loads(text)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(table, ensure_ascii=False).encode()  # half of a surrogate pair is no character
        if raw.count(b'"') != _quotes(table):
            json.loads(text, object_pairs_hook=_reject_duplicates(path))
    except UnicodeError as error:
        raise CheckpointError(f"{path}: the header is not UTF-8: {error}", path=path) from error
    except (ValueError, RecursionError) as error:  # ValueError: also for numbers of more than 4,300 digits
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}", path=path) from error
    assert isinstance(table, dict)  # it starts with '{'
    return table


def _quotes(table: dict[str, Any]) -> int:
    """Quotation marks in the JSON of ``table`` when nothing is odd about it.

    A key given twice is lost in a dict, but not its quotation marks. Counting them needs no slow hook for each entry.
    """
    count = 10 * len(table)  # an entry has those of its name, its three keys and its dtype
    if "__metadata__" in table:
        stored = table["__metadata__"]
        count += 2 - 10 + 4 * (len(stored) if isinstance(stored, dict) else 0)
    return count


def _reject_duplicates(path: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: the header names {twice!r} twice", path=path, tensor=twice)
        return table

    return build


def _metadata(stored: object, path: str) -> dict[str, str]:
    if stored is None:
        return {}
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path}: __metadata__ is {_type(stored)}, expected an object of strings", path=path)
    for key, value in stored.items():
        if not isinstance(value, str):
            raise CheckpointError(f"{path}: __metadata__[{key!r}] is {_type(value)}, expected a string", path=path)
    return stored


def _specs(table: dict[str, Any], path: str, data_start: int) -> list[TensorSpec]:
    """All entries at once; one by one, slower and with a message for each fault, when anything about them is odd."""
    specs: list[TensorSpec] = []
    numbers: list[Any] = []
    new, bits = tuple.__new__, BITS
    try:
        for name, entry in table.items():
            dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
            begin, end = offsets
            numbers += shape
            numbers += offsets
            if len(shape) > MAX_DIMENSIONS or sum(shape) < 0:  # strings and lists have no sum, but huge products
                raise ValueError
            if prod(shape) * bits[dtype] != (end - begin) * 8 or dtype == "F4" or type(shape) is not list:
                raise ValueError
            specs.append(new(TensorSpec, (name, dtype, tuple(shape), path, data_start + begin, end - begin, None)))
        if {*map(type, numbers)} <= _ONLY_INT and min(numbers, default=0) >= 0:
            return specs
    except (KeyError, TypeError, ValueError):
        pass
    return [_spec(name, entry, path, data_start) for name, entry in table.items()]


def _spec(name: str, entry: Any, path: str, data_start: int) -> TensorSpec:
    def wrong(problem: str) -> NoReturn:
        raise CheckpointError(f"{path}: tensor {name!r}: {problem}", path=path, tensor=name)

    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError):
        wrong("its entry needs dtype, shape and data_offsets, found " + _shown(entry))
    if not isinstance(dtype, str) or dtype not in BITS:
        wrong(f"unknown dtype {dtype!r} (known: {', '.join(BITS)}; installed torch: {_torch_version()})")
    if not isinstance(shape, list) or not {*map(type, shape)} <= _ONLY_INT or min(shape, default=0) < 0:
        wrong(f"shape {_shown(shape)} is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) >= 1 << 63:
        wrong(
            f"shape {_shown(shape)} is beyond what a tensor can have ({MAX_DIMENSIONS} dimensions of less than 2**63)"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not {*map(type, offsets)} <= _ONLY_INT:
        wrong(f"data_offsets {_shown(offsets)} should be two numbers, begin and end")
    begin, end = offsets
    if begin < 0 or end < begin:
        wrong(f"data_offsets {_shown(offsets)} run backwards or are negative")
    bits = BITS[dtype]
    if bits == 4 and shape and shape[-1] % 2:
        wrong(f"F4 packs two elements into a byte, but the last dimension of {shape} is odd")
    total = prod(shape) * bits
    if total % 8:
        wrong(f"{dtype} {shape} takes {total:,} bits, which is no whole number of bytes")
    if total != (end - begin) * 8:
        wrong(f"{dtype} {shape} takes {total // 8:,} bytes, but data_offsets {offsets} give it {end - begin:,}")
    return TensorSpec(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _check_cover(specs: list[TensorSpec], path: str, data_start: int, size: int, allow_trailing: bool) -> None:
    """The tensors must follow each other without hole or overlap, and end where the file does."""
    end, before = data_start, None
    for spec in specs:
        if spec.offset != end:
            after = f"after {before.name!r}" if before else "at the start of the data"
            if spec.offset < end:
                assert before is not None  # the first tensor cannot start before the data does
                problem = f"tensors {before.name!r} and {spec.name!r} overlap by {end - spec.offset:,} bytes"
            else:
                problem = f"{spec.offset - end:,} bytes {after} belong to no tensor (next is {spec.name!r})"
            raise CheckpointError(f"{path}: {problem}", path=path, tensor=spec.name)
        end, before = spec.offset + spec.nbytes, spec
    if size < end:
        short = next(spec for spec in specs if spec.offset + spec.nbytes > size)
        raise CheckpointError(
            f"{path}: expected {end:,} bytes (header and tensors), found {size:,}: {end - size:,} are missing, "
            f"from tensor {short.name!r} on; was the download interrupted?",
            path=path,
            tensor=short.name,
        )
    if size > end and not allow_trailing:
        raise CheckpointError(
            f"{path}: expected {end:,} bytes, found {size:,}: {size - end:,} bytes after the last tensor, which the "
            "format forbids (allow_trailing=True reads it all the same)",
            path=path,
        )


def _shown(value: object) -> str:
    """The beginning of ``value`` as JSON."""
    try:
        return json.dumps(value)[:80]
    except RecursionError:
        return "something nested too deep to show"


def _type(value: object) -> str:
    kinds = {list: "a list", dict: "an object", str: "a string", type(None): "null"}
    return kinds.get(type(value)) or _shown(value)


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"
