"""Open a checkpoint: find its files, read their headers, check that they agree. No weight is read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from streamload.checkpoint.header import check_regular, read_header
from streamload.checkpoint.hub import cached_snapshot
from streamload.checkpoint.index import Index, read_index
from streamload.checkpoint.locate import INDEX, SAFETENSORS, TORCH, choose, natural
from streamload.checkpoint.spec import Stamp, TensorSpec, stamp_of
from streamload.checkpoint.torch_zip import read_torch_zip
from streamload.errors import CheckpointError
from streamload.memory.collector import quiet_collector


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """The catalog of a checkpoint: every tensor, its dtype and shape, and where its bytes lie."""

    location: str
    """The file or folder, as found on this machine."""
    tensors: dict[str, TensorSpec]
    """Name -> spec, in file order."""
    files: tuple[str, ...]
    """Paths of the shards, links not resolved."""
    ignored: dict[str, str] = field(default_factory=dict)
    """File name -> why it was passed over."""
    skipped: tuple[TensorSpec, ...] = ()
    """Copies of tensors that the index places in another shard; never read."""
    notes: tuple[str, ...] = ()
    """What was odd but harmless."""
    stamps: dict[str, Stamp | None] = field(default_factory=dict)
    """Shard -> what tells whether it is still the file whose header was read."""
    metadata: dict[str, str] = field(default_factory=dict)
    """The ``__metadata__`` of the first safetensors shard."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Checkpoint({self.location!r}, {len(self.tensors):,} tensors, {len(self.files)} files, {self.nbytes:,} bytes)"

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        *,
        revision: str | None = None,
        unindexed: Literal["load", "ignore"] = "load",
        allow_trailing: bool = False,
        confine: bool = False,
    ) -> Checkpoint:
        """Read the headers of the checkpoint at ``location``.

        ``location`` is a folder, a single ``.safetensors``, ``.bin``, ``.pt`` or ``.pth`` file, an index file, or the name
        of a model in the local Hugging Face cache (then ``revision`` may name a branch or commit). ``unindexed`` says what
        becomes of tensors that lie in the shards but not in the index. ``allow_trailing`` accepts bytes after the last
        tensor of a safetensors file. ``confine`` refuses shards that are links to anywhere but the folder itself or the
        ``blobs`` of its Hugging Face cache.

        Raises CheckpointError with the file, the tensor, what was expected and what was found.
        """
        path = os.fspath(location)
        if not isinstance(path, str):
            raise CheckpointError(f"{path!r}: expected a path as a string, found {type(path).__name__}")
        if not (revision is None or isinstance(revision, str)):
            raise CheckpointError(f"revision={revision!r}: expected the name of a branch or a commit", path=path)
        if unindexed not in ("load", "ignore"):
            raise CheckpointError(f"unindexed={unindexed!r}: expected 'load' or 'ignore'", path=path)
        if "://" in path:
            raise CheckpointError(
                f"{path}: object stores are not supported yet; copy the checkpoint to a disk", path=path
            )
        if path.startswith("~") and not os.path.exists(path):
            path = os.path.expanduser(path)
        if not os.path.exists(path):
            path = cached_snapshot(path, revision)
        elif revision is not None:
            raise CheckpointError(
                f"{path}: is a path, so revision={revision!r} has no meaning; it is for names in the Hugging Face cache",
                path=path,
            )
        files, index, ignored = _locate(path)
        if confine:
            for file in files:
                _check_confined(file, os.path.dirname(index.path) if index else os.path.dirname(file))
        with quiet_collector():
            stamps = {file: stamp_of(file) for file in files}
            shards = [_read_shard(file, allow_trailing) for file in files]
            specs, skipped, notes = _merge(shards, index, unindexed)
        notes = [*(note for shard in shards for note in shard.notes), *notes]
        if os.path.isdir(path) and any(file.endswith(TORCH) for file in files):
            notes.append(
                f"read from torch's own format ({', '.join(map(os.path.basename, files[:3]))}), no safetensors there"
            )
        metadata = next((shard.metadata for shard in shards if shard.metadata), {})
        return cls(path, specs, tuple(files), ignored, tuple(skipped), tuple(notes), stamps, metadata)


@dataclass(frozen=True)
class _Shard:
    file: str
    specs: list[TensorSpec]
    metadata: dict[str, str]
    notes: list[str]


def _locate(path: str) -> tuple[list[str], Index | None, dict[str, str]]:
    """The shards to read, the index if there is one, and what was passed over."""
    if not os.path.isdir(path):
        if path.endswith(INDEX):
            index = read_index(path)
            return _indexed_files(index), index, {}
        return [path], None, {}
    choice = choose(_listing(path), path)
    if choice.index:
        index = read_index(os.path.join(path, choice.index))
        files = _indexed_files(index)
        used = {os.path.relpath(file, path) for file in files}
        return files, index, {name: why for name, why in choice.ignored.items() if name not in used}
    return [os.path.join(path, name) for name in choice.files], None, choice.ignored


def _listing(folder: str) -> Iterator[str]:
    """Names of the files in ``folder`` and in the folders right below it."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}", path=folder) from error
    for entry in entries:
        try:
            is_folder = entry.is_dir()
        except OSError:  # links that run in a circle
            is_folder = False
        if not is_folder:
            yield entry.name
        elif os.access(entry.path, os.R_OK | os.X_OK):
            yield from (f"{entry.name}/{name}" for name in sorted(os.listdir(entry.path)))


def _indexed_files(index: Index) -> list[str]:
    folder = os.path.dirname(index.path)
    names = sorted(set(index.weight_map.values()), key=natural)
    missing = [name for name in names if not os.path.exists(os.path.join(folder, name))]
    if missing:
        count = Counter(index.weight_map.values())
        shown = ", ".join(f"{name} ({count[name]} tensors)" for name in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise CheckpointError(
            f"{index.path}: {len(missing)} of the {len(names)} shards that it names are missing: {shown}{more}; is the "
            "download incomplete?",
            path=index.path,
        )
    return [os.path.join(folder, name) for name in names]


def _check_confined(file: str, folder: str) -> None:
    target, home = os.path.realpath(file), os.path.realpath(folder)
    allowed = [home]
    cache, snapshots, _ = home.rpartition("/snapshots/")
    if snapshots:
        allowed.append(os.path.join(cache, "blobs"))
    if not any(os.path.commonpath([target, folder]) == folder for folder in allowed):
        raise CheckpointError(
            f"{file}: is a link to {target}, outside its folder; refused because confine=True", path=file
        )


def _read_shard(file: str, allow_trailing: bool) -> _Shard:
    check_regular(file)
    if file.endswith(TORCH):
        specs, notes = read_torch_zip(file)
        return _Shard(file, specs, {}, notes)
    if not file.endswith(SAFETENSORS) and _is_zip(file):
        specs, notes = read_torch_zip(file)
        return _Shard(file, specs, {}, notes)
    specs, metadata = read_header(file, allow_trailing=allow_trailing)
    return _Shard(file, specs, metadata, [])


def _is_zip(file: str) -> bool:
    try:
        with open(file, "rb") as opened:
            return opened.read(4) == b"PK\x03\x04"
    except OSError:
        return False  # the reader of headers says what is wrong


def _merge(
    shards: list[_Shard], index: Index | None, unindexed: str
) -> tuple[dict[str, TensorSpec], list[TensorSpec], list[str]]:
    """One catalog of all shards: tensors in file order, copies that the index does not want, notes."""
    if index is None:
        return _union(spec for shard in shards for spec in shard.specs), [], []
    folder = os.path.dirname(index.path)
    home = {name: os.path.join(folder, file) for name, file in index.weight_map.items()}
    extra: list[TensorSpec] = []
    skipped: list[TensorSpec] = []
    tensors: dict[str, TensorSpec] = {}
    for spec in (spec for shard in shards for spec in shard.specs):
        wanted = home.get(spec.name)
        if wanted is None:
            extra.append(spec)
        elif wanted == spec.file:
            tensors[spec.name] = spec
        else:
            skipped.append(spec)
    if len(tensors) < len(home):
        raise _not_there(index, home, tensors, skipped)
    notes = [_skipped_note(index, skipped)] if skipped else []
    if extra:
        names = ", ".join(spec.name for spec in extra[:3]) + (", ..." if len(extra) > 3 else "")
        notes.append(
            f"{index.path}: {len(extra)} tensors are in the shards but not in the index ({names}): "
            + ("loaded all the same" if unindexed == "load" else "ignored")
        )
    if extra and unindexed == "load":
        order = {shard.file: position for position, shard in enumerate(shards)}
        both = [*tensors.values(), *_union(extra).values()]
        tensors = {spec.name: spec for spec in sorted(both, key=lambda spec: (order[spec.file], spec.offset))}
    total = sum(spec.nbytes for spec in tensors.values())
    if index.total_size is not None and index.total_size != total:
        notes.append(f"{index.path}: total_size says {index.total_size:,} bytes, the shards hold {total:,}")
    return tensors, skipped, notes


def _union(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    specs = list(specs)
    tensors = {spec.name: spec for spec in specs}
    if len(tensors) == len(specs):
        return tensors
    tensors.clear()
    for spec in specs:
        if (first := tensors.setdefault(spec.name, spec)) is not spec:
            raise CheckpointError(
                f"{spec.file}: tensor {spec.name!r} is also in {first.file}, and no index says which one counts; remove "
                "one file or add an index",
                path=spec.file,
                tensor=spec.name,
            )
    return tensors


def _not_there(
    index: Index, home: dict[str, str], found: dict[str, TensorSpec], elsewhere: list[TensorSpec]
) -> CheckpointError:
    lost = [name for name in home if name not in found]
    name = lost[0]
    shard = os.path.basename(home[name])
    really = next((os.path.basename(spec.file) for spec in elsewhere if spec.name == name), None)
    more = f" ({len(lost)} such tensors)" if len(lost) > 1 else ""
    if really:
        problem = f"{shard} does not contain tensor {name!r} that the index places there; it is in {really}{more}"
    else:
        problem = (
            f"tensor {name!r} is in no shard; the index places it in {shard}, which does not have it{more}; the index "
            "belongs to another version of this checkpoint"
        )
    return CheckpointError(f"{index.path}: {problem}", path=index.path, tensor=name)


def _skipped_note(index: Index, skipped: list[TensorSpec]) -> str:
    names = ", ".join(f"{spec.name} in {os.path.basename(spec.file)}" for spec in skipped[:3])
    return f"{index.path}: {len(skipped)} second copies are not read, the index decides: {names}"
