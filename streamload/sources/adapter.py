"""A LoRA adapter as PEFT saves it: what it changes, from its headers, and what becomes of a tensor that it changes."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamload.checkpoint import Checkpoint
from streamload.checkpoint.dtypes import FLOATS
from streamload.errors import CheckpointError, LoadError, SourceError
from streamload.sources.dtypes import CODES, torch_dtype
from streamload.sources.file import check_same
from streamload.sources.system import read_at

#: Elements that are computed at a time: 1 MiB in float32. Up to three such pieces exist at once.
CHUNK = 1 << 18

PARTS = "lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
_KEY = re.compile(rf"(?:(.+)\.)?({PARTS})(?:\.(?!(?:weight|bias)$)([^.]+))?(?:\.weight)?")
_SAVED = re.compile(r"(^|\.)modules_to_save\.(?:([^.]+)\.(?=.))?")
BASE_LAYER = re.compile(r"(^|\.)base_layer\.(?=[^.]+$)")

#: Settings under which a merged weight is not the base's plus a product of two matrices.
_REFUSED = re.compile(
    "alora_invocation_tokens|arrow_config|kasa_config|layer_replication|lora_bias|monteclora_config|target_parameters"
    "|trainable_token_indices|use_bdlora|use_qalora|velora_config"
)
#: Ways to begin that take something out of the base weights, which the stream then still has.
_ALTERING = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Change(NamedTuple):
    """What becomes of one tensor of the base."""

    keys: dict[str, str]
    """Part -> the adapter's tensor: ``lora_A`` and ``lora_B`` make up a delta, ``new`` stands in for the base."""
    shape: tuple[int, ...]
    scale: float = 0.0
    turned: bool = False
    """Whether the base is stored as inputs x outputs."""


class Adapter:
    """What an adapter changes, from its headers. Values are read when they are needed."""

    def __init__(self, folder: str) -> None:
        self._config = _read_config(folder)
        files = [os.path.join(folder, name) for name in ("adapter_model.safetensors", "adapter_model.bin")]
        self.file = next(filter(os.path.exists, files), files[0])
        checkpoint = Checkpoint.open(self.file)
        self._specs, self._stamp = checkpoint.tensors, checkpoint.stamps[self.file]
        parts: dict[str, dict[str, str]] = defaultdict(dict)
        names: set[str] = set()
        for key in self._specs:
            target, part, name = self._place(key)
            names |= {name} - {""}
            if (first := parts[target].setdefault(part, key)) != key or len(names) > 1:
                raise self._damaged(f"{key!r} and {first!r} are of two adapters; expected one in a file", key)
        self.changes = {target: self._change(target, keys) for target, keys in parts.items()}
        if not self.changes:
            raise self._damaged(
                "holds no tensors, expected those of an adapter; was it saved from another process?", ""
            )
        self._opened = open(self.file, "rb", buffering=0)  # noqa: SIM115  until it is closed
        base = self._config.get("base_model_name_or_path")
        new = sum(change.keys.keys() == {"new"} for change in self.changes.values())
        self.summary = f"{self.file}: merged into {len(self.changes) - new} tensors, and {new} replaced"
        self.origin = f"; the adapter was trained on {base!r}" if base else ""

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def _read(self, key: str, rows: slice | None = None) -> Tensor:
        """The values of ``key``, or ``rows`` of them. The library's slices would read all of it for each."""
        spec = self._specs[key]
        shape, at, nbytes, dtype = spec.shape or (1,), spec.offset, spec.span, torch_dtype(spec.dtype)
        if rows is not None and spec.strides is None:
            shape = (rows.stop - rows.start, *shape[1:])
            at, nbytes = at + rows.start * math.prod(shape[1:]) * dtype.itemsize, math.prod(shape) * dtype.itemsize
        read = torch.empty(nbytes, dtype=torch.uint8)
        try:
            check_same(self.file, self._opened.fileno(), self._stamp)
            got = read_at(self._opened.fileno(), at, [read.data_ptr(), nbytes])
        except OSError as error:
            raise SourceError(f"{self.file}: {key!r} cannot be read: {error.strerror}", path=self.file) from error
        if got != nbytes:
            raise SourceError(f"{self.file}: ends before {key!r}, it was cut", path=self.file, offset=at + got)
        if spec.strides is None:
            return read.view(dtype).view(shape)
        whole = read.view(dtype).as_strided(shape, spec.strides)
        return whole if rows is None else whole[rows]

    def _damaged(self, problem: str, tensor: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {problem}", path=self.file, tensor=tensor)

    def _place(self, key: str) -> tuple[str, str, str]:
        """The base tensor that ``key`` changes, as which part of the change, and the name of the adapter if ``key`` has it."""
        name = plain_name(key)
        if match := _KEY.fullmatch(name):
            return f"{match[1]}.weight" if match[1] else "weight", match[2].replace("embedding_", ""), match[3] or ""
        if re.search(r"(^|\.)(lora_|trainable_tokens_)", name):
            raise LoadError(
                f"{self.file}: {key!r} is of a kind that cannot be merged here; merge it with peft, then load"
            )
        saved = _SAVED.search(name)
        return _SAVED.sub(r"\1", name), "new", (saved and saved[2]) or ""

    def _change(self, target: str, keys: dict[str, str]) -> Change:
        """The change to ``target``, checked."""
        if keys.keys() == {"new"}:
            return Change(keys, self._specs[keys["new"]].shape)
        dora = bool(self._config.get("use_dora"))
        wanted = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if dora else set())
        if wrong := sorted(wanted ^ (keys.keys() - {"new"})):
            problem = f"{target!r} {'has no' if wrong[0] in wanted else 'also has a'} {wrong[0]}"
            raise self._damaged(f"{problem}, with use_dora={dora}; is the file complete?", target)
        path = target.rpartition(".")[0]
        rank, alpha = self._number("r", "rank_pattern", path), self._number("lora_alpha", "alpha_pattern", path)
        right, left = self._specs[keys["lora_A"]].shape, self._specs[keys["lora_B"]].shape
        inputs, outputs, ones = right[1:] or ("inputs",), left[0] if left else "outputs", (1,) * (len(right) - 2)
        turned = "lora_embedding_A" in keys["lora_A"] or (not ones and bool(self._config.get("fan_in_fan_out")))
        expected: dict[str, tuple[Any, ...]] = {
            "lora_A": (rank, *inputs),
            "lora_B": (outputs, rank, *ones),
            "lora_magnitude_vector": (1, outputs, *ones) if ones else (outputs,),
            "new": (*inputs, outputs) if turned else (outputs, *inputs),
        }
        for part, key in keys.items():
            spec = self._specs[key]
            if spec.shape != expected[part] or spec.dtype not in FLOATS:
                raise LoadError(
                    f"{self.file}: expected {key!r} of {list(expected[part])}, by its partners and the rank of {rank} in "
                    f"adapter_config.json, as {', '.join(FLOATS)}; found {list(spec.shape)} as {spec.dtype}"
                )
        scale = alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)
        return Change(keys, expected["new"], scale, turned)

    def _number(self, name: str, patterns: str, path: str) -> Any:
        """The setting ``name`` for the module ``path``: that of the first pattern that fits, as PEFT has it."""
        value = self._config.get(name, 8)
        try:
            for like, other in (self._config.get(patterns) or {}).items():
                if re.match(rf"(.*\.)?({like})$", path):
                    value = other
                    break
            if not math.isfinite(value) or (name == "r" and (value < 1 or int(value) != value)):
                raise ValueError(f"{value} for {path!r}")
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise self._damaged(f"{name} or {patterns} in adapter_config.json cannot be used: {error}", path) from error
        return value

    def apply(self, target: str, name: str, base: Tensor) -> Tensor:
        """A new tensor: ``base``, which is stored as ``name``, with the change to ``target``."""
        change, code = self.changes[target], CODES.get(base.dtype, str(base.dtype))
        what = f"{self.file}: {' and '.join(map(repr, change.keys.values()))}"
        if tuple(base.shape) != change.shape:
            many = "; several weights in one have to be taken apart first" if base.ndim > len(change.shape) else ""
            raise LoadError(
                f"{what}: expected a base tensor of {list(change.shape)}, found {name!r} of {list(base.shape)}{many}{self.origin}"
            )
        if code not in FLOATS and any(self._specs[key].dtype != code for key in change.keys.values()):
            raise LoadError(
                f"{what}: cannot be merged into {name!r}, which is {code}, expected one of {', '.join(FLOATS)}; use the "
                "checkpoint as it was before it was quantised"
            )
        made = torch.empty(base.shape, dtype=base.dtype, device=base.device)
        self._fill(made if made.ndim else made.view(1), base.detach(), change)
        return made

    def _fill(self, made: Tensor, base: Tensor, change: Change) -> None:
        """Write into ``made`` what becomes of ``base``, piece by piece."""
        keys, new = change.keys, change.keys.get("new")
        device, dtype = made.device, torch.float64 if made.dtype == torch.float64 else torch.float32

        def before(rows: slice) -> Tensor:
            return base[rows] if new is None else self._read(new, rows)

        if "lora_A" not in keys:
            for rows in _pieces(made):
                made[rows] = before(rows)
            return
        right, left = (self._read(keys[part]).flatten(1) for part in ("lora_A", "lora_B"))
        if change.turned:
            left, right = right.T, left.T
        right = right.to(device, dtype)

        def summed() -> Iterator[tuple[slice, Tensor]]:
            for rows in _pieces(made):
                part = before(rows).to(device, dtype).flatten(1)
                yield rows, torch.addmm(part, left[rows].to(device, dtype), right, alpha=change.scale)

        factor: Any = None
        if key := keys.get("lora_magnitude_vector"):  # DoRA: every output gets this norm
            magnitude = self._read(key).flatten().to(device)
            squares = torch.zeros(magnitude.shape, dtype=torch.float64, device=device)
            for rows, part in summed():
                if change.turned:
                    squares += part.square_().sum(0, dtype=torch.float64)
                else:
                    squares[rows] = part.square_().sum(1, dtype=torch.float64)
            factor = (magnitude / squares.sqrt()).to(dtype)
        for rows, part in summed():
            if factor is not None:
                part *= factor if change.turned else factor[rows, None]
            made[rows] = part.view(made[rows].shape)


def _read_config(folder: str) -> dict[str, Any]:
    """The settings of an adapter. Raises CheckpointError, and LoadError when they cannot be merged by."""
    path = os.path.join(folder, "adapter_config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        if not isinstance(config, dict):
            raise ValueError(f"expected an object, found {type(config).__name__}")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error}; expected the folder of an adapter, as PEFT's save_pretrained writes it",
            path=path,
        ) from error
    kind, begin = config.get("peft_type"), str(config.get("init_lora_weights"))
    if kind != "LORA":
        raise LoadError(f"{path}: peft_type is {kind!r}, expected 'LORA'; merge it with peft, then load the result")
    if name := next((name for name in config if config[name] and _REFUSED.fullmatch(name)), None):
        raise LoadError(f"{path}: {name} is set, which cannot be merged here; merge it with peft, then load the result")
    if begin.lower().startswith(_ALTERING):
        raise LoadError(
            f"{path}: init_lora_weights={begin!r} changed the base weights before the training, so the deltas do not fit the "
            "original ones; save it with path_initial_model_for_weight_conversion, or, if the stream is that changed base, "
            "set init_lora_weights to true"
        )
    return config


def plain_name(name: str) -> str:
    """``name`` without what PEFT puts around and into it."""
    while name.startswith("base_model.model."):
        name = name.removeprefix("base_model.model.")
    return BASE_LAYER.sub(r"\1", name)


def _pieces(tensor: Tensor) -> Iterator[slice]:
    """Rows of ``tensor`` that have CHUNK elements together, one row at least."""
    step = max(1, CHUNK // max(1, math.prod(tensor.shape[1:])))
    for start in range(0, len(tensor), step):
        yield slice(start, min(start + step, len(tensor)))
