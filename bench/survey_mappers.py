"""Every name mapper of the installed vLLM, rebuilt as ours and tried on the same names; the differences, sorted by kind.

    PYTHONPATH=. python-with-vllm bench/survey_mappers.py [--markdown FILE] [--json FILE]

Names come from each mapper's own rules, from published layouts written down below, and from transformers' classes (built
on meta, their names turned back into those of the checkpoint). A difference is sorted by playing the name through both
contracts, written down here once more and apart from the package; one that this does not explain is "other". Exits with
1 when ours raises, when a difference is of kind "other", or when a published name goes astray in its module.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import itertools
import json
import logging
import os
import pkgutil
import random
import re
import sys
import textwrap
import time
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from streamload.mapping import Mapped, WeightsMapper

Result = tuple[str, Any] | None
STAGES = ("renaming", "regex", "substr", "stacked", "prefix", "suffix")
BACKEND = "transformers backend, "
STAND_INS = ("torchvision", "torchaudio", "timm", "terratorch")
MOST_PAIRS = 4000
MOST_WORDS = 20
"""Of the transformers backend, whose rules are the same in every layer."""

KINDS = {
    "cascade": "vLLM's stacked rule fired on its own or another's output (`qkqkv_proj`)",
    "inside": "vLLM's stacked rule hit inside a component (`.q_proj` in `.q_proj_norm`)",
    "tensor": "the same, at a tensor's name (`.q_proj.weight` in `.q_proj.weight_scale`)",
    "edge": "the component stands at the start or end of the name, where the dot of vLLM's rule finds none",
    "doubled": "vLLM repeated what the name has already (`model.model.`)",
    "order": "several stacked rules match whole components: vLLM takes the last in the list, we the most specific",
    "other": "unexplained",
}
VERDICTS = {
    "cascade": "ours: no module has the name that vLLM makes",
    "inside": "ours: another module's tensor would be put into the fused one",
    "tensor": "vLLM's; ours too as soon as the module is known, which is how a load asks",
    "edge": "ours inside a submodule, whose names come stripped; the module settles it",
    "doubled": "ours, unless the module nests the name once more; the module settles it",
    "order": "both defensible",
    "other": "to be looked at",
}


# ---- Collecting -----------------------------------------------------------------------------------------------------


class Anything(type):
    """The type of whatever is asked of a module that is not installed: it can be named, called and inherited from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return type.__call__(cls)


class StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each of ``STAND_INS``; asked last, so that an installed one is preferred."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"


class Imports(NamedTuple):
    helped: dict[str, str]
    """Modules that could be imported with a stand-in only, and what they wanted."""
    failed: dict[str, str]


def import_models() -> Imports:
    import vllm.model_executor.layers.quantization as layers
    import vllm.model_executor.models as models

    names = [each.name for each in pkgutil.walk_packages(models.__path__, f"{models.__name__}.")]
    names += [each.name for each in pkgutil.walk_packages(layers.__path__, f"{layers.__name__}.")]
    first = _failures(names)
    sys.meta_path.append(StandInFinder())
    failed = _failures(list(first))
    return Imports({name: why for name, why in first.items() if name not in failed}, failed)


def _failures(names: Iterable[str]) -> dict[str, str]:
    failed: dict[str, str] = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a model needs
            failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
    return failed


@dataclass
class Found:
    """One mapper of vLLM's."""

    theirs: Any
    labels: list[str]
    owners: list[type] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.labels[0]

    @property
    def modules(self) -> set[str]:
        return {owner.__module__ for owner in self.owners}

    @property
    def is_backend(self) -> bool:
        return self.label.startswith(BACKEND)

    def table(self, stage: str) -> Mapping[Any, Any]:
        return getattr(self.theirs, f"orig_to_new_{stage}")

    def with_plain_patterns(self) -> WeightsMapper:
        """Our mapper with the patterns, which vLLM compiles with the ``regex`` package, compiled by ``re``."""
        tables = {f"orig_to_new_{stage}": dict(self.table(stage)) for stage in STAGES[1:]}
        tables["orig_to_new_regex"] = {old.pattern: new for old, new in self.table("regex").items()}
        return WeightsMapper(orig_to_new_renaming=self.theirs.orig_to_new_renaming, **tables)


def collect() -> list[Found]:
    """The mappers of classes and modules, those that functions make, those of quantisations, and of transformers models."""
    theirs = _mapper_class()
    found: dict[int, Found] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("vllm.") and isinstance(module, types.ModuleType):
            for label, mapper, owner in _held_by(module):
                if isinstance(mapper, theirs):
                    each = found.setdefault(id(mapper), Found(mapper, []))
                    each.labels.append(label)
                    each.owners += [owner] if owner else []
    return [*found.values(), *_of_functions(), *_of_quantisations(), *_of_transformers()]


def _mapper_class() -> type:
    from vllm.model_executor.models.utils import WeightsMapper as Theirs

    return Theirs


def _held_by(module: types.ModuleType) -> Iterator[tuple[str, Any, type | None]]:
    short = module.__name__.rpartition("models.")[2]
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, held in list(vars(value).items()):
                if isinstance(held, property) and "mapper" in attribute:
                    with contextlib.suppress(Exception):
                        held = held.fget(types.SimpleNamespace())
                yield f"{short}.{value.__name__}.{attribute}".removesuffix(".hf_to_vllm_mapper"), held, value
        else:
            yield f"{short}:{name}", value, None


def _of_quantisations() -> Iterator[Found]:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    classes = [QuantizationConfig, *_subclasses(QuantizationConfig)]
    for cls in classes:
        for method in ("get_cache_scale_mapper", "get_checkpoint_weight_mapper"):
            if method in vars(cls):
                with contextlib.suppress(Exception):
                    yield Found(getattr(cls, method)(), [f"{cls.__name__}.{method}()"], [cls])


def _subclasses(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


# ---- Mappers made in functions ---------------------------------------------------------------------------------------

_CONFIG = types.SimpleNamespace(
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    num_nextn_predict_layers=2,
    attention_k_eq_v=True,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
_LOCALS = {
    "config": _CONFIG,
    "self": types.SimpleNamespace(config=_CONFIG, get_frope_params_map=dict),
    **dict.fromkeys(("spec_layer", "start", "base"), 4),
    **dict.fromkeys(("num_mtp", "num_nextn_layers"), 2),
}


def _of_functions() -> Iterator[Found]:
    """Mappers written in a function, with stand-ins for its variables and every branch taken."""
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("vllm.model_executor.models.") or name.endswith(".models.utils"):
            continue
        with contextlib.suppress(OSError, TypeError):
            tree = ast.parse(inspect.getsource(module))
            for function in (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)):
                yield from _in_function(module, function, tree)


def _in_function(module: types.ModuleType, function: ast.FunctionDef, tree: ast.Module) -> Iterator[Found]:
    short = module.__name__.rpartition("models.")[2]
    for call in ast.walk(function):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "WeightsMapper"):
            continue
        label = f"{short} in {function.name}(), line {call.lineno}"
        try:
            variables = {**vars(module), **_LOCALS}
            _run_assignments(function, variables)
            mapper = eval(compile(ast.Expression(call), label, "eval"), variables)
        except Exception:
            mapper = None
        owner = next(
            (each for each in tree.body if isinstance(each, ast.ClassDef) and function in ast.walk(each)), None
        )
        yield Found(mapper, [label], [getattr(module, owner.name)] if owner else [])


def _run_assignments(function: ast.FunctionDef, variables: dict[str, Any]) -> None:
    """Run the assignments that build tables of rules, in the order in which they are written."""
    kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign)
    for statement in sorted(
        (each for each in ast.walk(function) if isinstance(each, kinds)), key=lambda each: each.lineno
    ):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        root = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(root, ast.Name) and re.search(
            "orig_to_new|stacked|drops|shards|shared|k_eq_v|num_layers", root.id
        ):
            with contextlib.suppress(Exception):
                exec(compile(ast.Module([statement], []), "assignment", "exec"), variables)


# ---- transformers' layouts -------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    model: Any
    names: list[str]
    published: list[str]


def layouts() -> dict[str, Layout]:
    """The names of the small ones of vLLM's architectures that transformers has too, as built and as published."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from vllm.model_executor.models.registry import ModelRegistry

    found: dict[str, Layout] = {}
    for name in sorted(ModelRegistry.get_supported_archs()):
        with contextlib.suppress(Exception):
            cls = getattr(transformers, name)
            with torch.device("meta"):
                model = cls(_small(cls.config_class()))
            table = model.state_dict()
            published = list(table)
            with contextlib.suppress(Exception):
                published = list(revert_weight_conversion(model, table))
            found[name] = Layout(model, _few(table), _few(published))
    return found


def _small(config: Any) -> Any:
    counts = ("num_hidden_layers", "num_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")
    for key in counts:
        if isinstance(getattr(config, key, None), int):
            with contextlib.suppress(Exception):
                setattr(config, key, 2)
    for key in ("layer_types", "layers_block_type"):
        if getattr(config, key, None):
            with contextlib.suppress(Exception):
                setattr(config, key, list(getattr(config, key))[:2])
    for part in list(vars(config).values()):
        if hasattr(part, "to_diff_dict"):
            _small(part)
    return config


def _few(names: Iterable[str]) -> list[str]:
    """Those of the first experts and layers."""
    return [name for name in names if all(int(part) < 2 for part in name.split(".") if part.isdigit())]


_LAYOUTS: dict[str, Layout] = {}


def _of_transformers() -> Iterator[Found]:
    """What vLLM's transformers backend makes for a model: conversions, prefixes, and one stacked rule for each module."""
    from vllm.model_executor.models.transformers.base import Base

    theirs = _mapper_class()
    for name, layout in _LAYOUTS.items():
        backend = types.SimpleNamespace(
            model=getattr(layout.model, "base_model", layout.model),
            config=layout.model.config,
            _maybe_apply_model_mapping=lambda: None,
        )
        with contextlib.suppress(Exception):
            Base._create_hf_to_vllm_mapper(backend)
            stacked = theirs(orig_to_new_stacked=dict(_fused(layout.names)))
            yield Found(backend.hf_to_vllm_mapper | stacked, [f"{BACKEND}{name}"], [type(layout.model)])


def _fused(names: Sequence[str]) -> Iterator[tuple[str, tuple[str, Any]]]:
    modules = {name.rpartition(".")[0] for name in names}
    families = (
        ("qkv_proj", {"q_proj": "q", "k_proj": "k", "v_proj": "v"}),
        ("gate_up_proj", {"gate_proj": 0, "up_proj": 1}),
    )
    for module in sorted(modules):
        above, _, last = module.rpartition(".")
        for fused, parts in families:
            if last in parts and all(f"{above}.{each}" in modules for each in parts):
                prefix = above if above.startswith("model.") else f"model.{above}"
                yield f"{prefix}.{last}", (f"{prefix}.{fused}", parts[last])


# ---- Names -----------------------------------------------------------------------------------------------------------

_LLAMA = """self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight self_attn.o_proj.weight mlp.gate_proj.weight
mlp.up_proj.weight mlp.down_proj.weight input_layernorm.weight post_attention_layernorm.weight"""
_QUANTISED = """self_attn.q_proj.weight_scale self_attn.k_proj.weight_scale_inv self_attn.v_proj.qweight self_attn.k_proj.qzeros
self_attn.q_proj.g_idx self_attn.v_proj.weight_packed mlp.gate_proj.input_scale mlp.up_proj.weight.absmax self_attn.k_proj.k_scale
self_attn.v_scale self_attn.k_scale mlp.down_proj.weight.quant_state.bitsandbytes__nf4 self_attn.q_proj.lora_A.weight"""
_SIGLIP = """embeddings.patch_embedding.weight embeddings.patch_embedding.bias embeddings.position_embedding.weight
encoder.layers.N.self_attn.q_proj.weight encoder.layers.N.self_attn.k_proj.bias encoder.layers.N.self_attn.v_proj.weight
encoder.layers.N.self_attn.out_proj.weight encoder.layers.N.layer_norm1.weight encoder.layers.N.mlp.fc1.weight
encoder.layers.N.mlp.fc2.bias post_layernorm.weight head.probe head.attention.in_proj_weight head.layernorm.weight
head.mlp.fc1.weight embeddings.position_ids"""
_BERT = """embeddings.word_embeddings.weight embeddings.position_embeddings.weight embeddings.position_ids
embeddings.token_type_embeddings.weight embeddings.LayerNorm.weight embeddings.LayerNorm.gamma
encoder.layer.N.attention.self.query.weight encoder.layer.N.attention.self.key.bias encoder.layer.N.attention.self.value.weight
encoder.layer.N.attention.output.dense.weight encoder.layer.N.attention.output.LayerNorm.beta
encoder.layer.N.intermediate.dense.weight encoder.layer.N.output.dense.bias encoder.layer.N.output.LayerNorm.weight
pooler.dense.weight"""
_MODERNBERT = """embeddings.tok_embeddings.weight embeddings.norm.weight layers.N.attn.Wqkv.weight layers.N.attn.Wo.weight
layers.N.attn_norm.weight layers.N.mlp.Wi.weight layers.N.mlp.Wo.weight layers.N.mlp_norm.weight final_norm.weight"""
_GPT2 = """wte.weight wpe.weight h.N.ln_1.weight h.N.attn.bias h.N.attn.masked_bias h.N.attn.c_attn.weight h.N.attn.c_proj.bias
h.N.ln_2.weight h.N.mlp.c_fc.weight h.N.mlp.c_proj.weight ln_f.weight"""


def _decoder(layer: str, extra: str = "") -> str:
    tensors = " ".join(f"layers.N.{each}" for each in f"{layer} {extra}".split())
    return f"embed_tokens.weight {tensors} norm.weight"


_QWEN3_MOE = "mlp.gate.weight " + " ".join(
    f"mlp.experts.{expert}.{each}.weight" for expert in (0, 10, 127) for each in ("gate_proj", "up_proj", "down_proj")
)
_MIXTRAL = "block_sparse_moe.gate.weight " + " ".join(
    f"block_sparse_moe.experts.{expert}.{each}.weight" for expert in range(3) for each in ("w1", "w2", "w3")
)
_QK_NORM = "self_attn.q_norm.weight self_attn.k_norm.weight"
_GEMMA3 = f"{_QK_NORM} pre_feedforward_layernorm.weight post_feedforward_layernorm.weight"
_GEMMA4 = f"{_GEMMA3} layer_scalar per_layer_input_gate.weight per_layer_projection.weight experts.gate_up_proj"
_DELTA = """linear_attn.in_proj_qkv.weight linear_attn.in_proj_z.weight linear_attn.in_proj_a.weight linear_attn.in_proj_b.weight
linear_attn.in_proj_qkvz.weight linear_attn.in_proj_ba.weight linear_attn.conv1d.weight linear_attn.A_log linear_attn.dt_bias
linear_attn.norm.weight linear_attn.out_proj.weight mlp.shared_expert.gate_proj.weight mlp.shared_expert.up_proj.weight
mlp.shared_expert_gate.weight mlp.experts.gate_up_proj mlp.experts.down_proj"""
_ROTARY = "self_attn.rotary_emb.inv_freq attention.rotary_emb.inv_freq attn.rotary_pos_emb.inv_freq attn.rotary_emb.sin_cached"
_MINICPM_VPM = """embeddings.patch_embedding.weight embeddings.position_embedding.weight
encoder.layers.N.self_attn.q_proj.weight encoder.layers.N.self_attn.k_proj.weight encoder.layers.N.self_attn.v_proj.bias
encoder.layers.N.self_attn.out_proj.weight encoder.layers.N.mlp.fc1.weight
encoder.layers.N.layer_norm2.bias post_layernorm.weight"""
_MINICPM_MERGER = """vit_merger.self_attn.q_proj.weight vit_merger.self_attn.k_proj.weight vit_merger.self_attn.v_proj.weight
vit_merger.self_attn.out_proj.weight vit_merger.layer_norm1.weight vit_merger.linear_1.weight vit_merger.mlp.fc1.weight
merger.mlp.0.linear_1.weight merger.mlp.0.pre_norm.weight"""
_HEADS = """lm_head.weight lm_head.bias score.weight score.bias classifier.weight classifier.bias classifier.dense.weight
classifier.out_proj.bias head.dense.weight decoder.weight qa_outputs.weight cls.predictions.bias cls.predictions.decoder.weight
cls.predictions.transform.LayerNorm.gamma cls.seq_relationship.weight v_head.summary.weight model.lm_head.weight
language_model.lm_head.weight mtp.layers.0.self_attn.q_proj.weight"""

PUBLISHED: list[tuple[tuple[str, ...], str]] = [
    (("model.", "", "language_model.model.", "model.language_model."), _decoder(f"{_LLAMA} {_QUANTISED} {_ROTARY}")),
    (
        ("model.", "", "model.language_model."),
        _decoder(_LLAMA, _QK_NORM + " self_attn.q_proj.bias self_attn.v_proj.bias"),
    ),
    (("model.",), _decoder(_LLAMA, _QWEN3_MOE)),
    (("model.",), _decoder(_LLAMA, _MIXTRAL)),
    (("model.", "language_model.model.", "model.language_model."), _decoder(_LLAMA, _GEMMA3)),
    (("model.language_model.", "model."), _decoder(_LLAMA, _GEMMA4)),
    (("model.", "model.language_model."), _decoder(_LLAMA, _DELTA)),
    (("", "transformer."), _GPT2),
    (("", "bert.", "roberta.", "model."), _BERT),
    (("", "model."), _MODERNBERT),
    (
        ("", "vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model."),
        _SIGLIP,
    ),
    (("model.vision_tower.", "vision_tower.", "vpm.", "model.vpm."), _MINICPM_VPM),
    (("", "model.", "model.vision_tower."), _MINICPM_MERGER),
    (("",), f"multi_modal_projector.mm_input_projection_weight model.multi_modal_projector.linear_1.weight {_HEADS}"),
]  # beginnings, names


def published() -> list[str]:
    names = [
        f"{start}{tail.replace('.N.', f'.{layer}.')}"
        for starts, tails in PUBLISHED
        for start in starts
        for tail in tails.split()
        for layer in (0, 1, 11)
    ]
    return list(dict.fromkeys([*names, "lm_head.weight"]))


def stripped(names: Iterable[str]) -> Iterator[str]:
    """``names`` as they are and as each submodule sees them."""
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[at:]) for at in range(min(6, len(parts))))


_STARTS = (
    "", "model.", "layers.0.", "layers.11.self_attn.", "model.layers.3.", "model.layers.3.mlp.experts.7.", "blocks.2.attn.",
    "vision_tower.encoder.layers.11.", "language_model.model.", "model.language_model.", "visual.", "model.model.",
)  # fmt: skip
_ENDS = ("", ".weight", ".bias", ".weight_scale", ".weight.absmax", ".qweight", ".0.weight", ".layers.5.q_proj.weight")
_TWISTS = ("my_{}", "{}_norm", "my_{}_norm", "{}2", "2{}", "{0}.{0}", "{0}_{0}", "{}_a.{}")


def derived(found: Found, rng: random.Random) -> list[str]:
    """Names made of the mapper's rules: what they look for, what they make, alone, in pairs, twisted, and shuffled."""
    words = list(dict.fromkeys(_words(found)))
    if found.is_backend and len(words) > MOST_WORDS:
        words = rng.sample(words, MOST_WORDS)
    names = list(_around(words))
    pairs = [f"{one}.{two}{end}" for one, two in itertools.permutations(words, 2) for end in ("", ".weight")]
    names += pairs if len(pairs) < MOST_PAIRS else rng.sample(pairs, MOST_PAIRS)
    parts = sorted({part for word in words for part in word.split(".") if part} | {"model", "layers", "0", "weight"})
    names += [".".join(rng.choices(parts, k=rng.randint(2, 7))) for _ in range(600)]
    return [name for name in dict.fromkeys(names) if name]


def _around(words: Sequence[str]) -> Iterator[str]:
    starts, ends = (_STARTS, _ENDS) if len(words) < 200 else (("", "model."), ("", ".weight"))
    for word in words:
        for start in starts:
            yield from (f"{start}{word}{end}" for end in ends)
            yield from (f"{start}{twist.format(word, word)}.weight" for twist in _TWISTS)
        yield from (f"{word}layers.0.mlp.up_proj.weight", f"{word}weight", f"a{word}b")


def _words(found: Found) -> Iterator[str]:
    for stage in STAGES[1:]:
        for old, new in found.table(stage).items():
            new = new[0] if stage == "stacked" else new
            texts = samples(old) if stage == "regex" else [old]
            if stage == "regex" and new is not None:
                texts += [old.sub(new, text) for text in texts]
            elif new is not None:
                texts.append(new)
            yield from (text for each in texts for text in (each.strip("."), each.lstrip(".")) if text)


def samples(pattern: re.Pattern[str], most: int = 24) -> list[str]:
    """Texts that ``pattern`` finds, one for each way through its branches."""
    parsed = re._parser.parse(pattern.pattern)  # type: ignore[attr-defined]
    texts = itertools.islice(_spell(list(parsed)), most * 4)
    return [text for text in texts if pattern.search(text)][:most]


def _spell(items: list[Any]) -> Iterator[str]:
    if not items:
        yield ""
        return
    (kind, value), rest = items[0], items[1:]
    for head in _one(str(kind), value):
        yield from (head + tail for tail in _spell(rest))


def _one(kind: str, value: Any) -> Iterable[str]:
    if kind == "LITERAL":
        return [chr(value)]
    if kind == "IN":
        options = {str(how): what for how, what in value}
        digit = "DIGIT" in str(options.get("CATEGORY", ""))
        return ["3"] if digit else [chr(what) for how, what in value if str(how) == "LITERAL"] or ["weight"]
    if kind == "BRANCH":
        return (text for way in value[1] for text in _spell(list(way)))
    if kind == "SUBPATTERN":
        return _spell(list(value[-1]))
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        return _spell(list(value[2]) if value[1] else [])
    return ["proj.weight"] if kind == "ANY" else [""]


# ---- Both contracts once more ----------------------------------------------------------------------------------------


class Rules:
    """The rules of a mapper, applied as our contract says, noting where vLLM's would do otherwise and why."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._stacked = [
            (number, old, new, shard, old.strip(".").split("."))
            for number, (old, (new, shard)) in enumerate(found.table("stacked").items())
        ]

    def play(self, name: str) -> tuple[Result, set[str]]:
        kinds: set[str] = set()
        for rule in self._found.theirs.orig_to_new_renaming:
            name = rule.rename_source_key(name)[0]
        for pattern, new in self._found.table("regex").items():
            if pattern.search(name):
                if new is None:
                    return None, kinds
                name = self._sub(pattern, new, name, kinds)
        current = self._literals("substr", name, kinds)
        if current is None:
            return None, kinds
        current, shard = self._fuse(current, kinds)
        for stage in ("prefix", "suffix"):
            current = None if current is None else self._literals(stage, current, kinds)
        return (None if current is None else (current, shard)), kinds

    def _sub(self, pattern: Any, new: str, name: str, kinds: set[str]) -> str:
        def put(match: re.Match[str]) -> str:
            text = match.expand(new)
            if len(text) > len(match[0]) and _stands_around(name, match.start(), match[0], text):
                kinds.add("doubled")
                return match[0]
            return text

        return pattern.sub(put, name)

    def _literals(self, stage: str, name: str, kinds: set[str]) -> str | None:
        for old, new in self._found.table(stage).items():
            at = _place(stage, name, old)
            if at is None:
                continue
            if new is None:
                return None
            if old != new and old in new and _stands_around(name, at, old, new):
                kinds.add("doubled")
                continue
            name = name[:at] + new + name[at + len(old) :]
        return name

    def _fuse(self, name: str, kinds: set[str]) -> tuple[str, Any]:
        if not self._stacked:
            return name, None
        parts, hits = name.split("."), []
        for number, old, new, shard, own in self._stacked:
            for at in range(len(parts) - len(own) + 1):
                if parts[at : at + len(own)] == own and not _is_fused(parts, at, own, new.strip(".").split(".")):
                    hits.append(((len(own), len(old), at, number), at, own, new, shard))
                    break
        ours: tuple[str, Any] = (name, None)
        if hits:
            _, at, own, new, shard = max(hits, key=lambda hit: hit[0])
            ours = ".".join([*parts[:at], *new.strip(".").split("."), *parts[at + len(own) :]]), shard
        raw, raw_kinds = self._raw(name)
        if raw != ours:
            kinds |= raw_kinds | ({"order"} if len(hits) > 1 else set())
            if hits and (raw[1] is None or not kinds):
                kinds.add("edge")
        return ours

    def _raw(self, name: str) -> tuple[tuple[str, Any], set[str]]:
        """What vLLM's stacked rules do, and what is wrong with it."""
        shard, kinds, made = None, set(), [False] * len(name)
        for _, old, new, part, own in self._stacked:
            at = name.find(old)
            if at < 0:
                continue
            end = at + len(old)
            lead = at + len(old) - len(old.lstrip("."))
            last = end - (len(old) - len(old.rstrip(".")))
            begins, ends = lead == 0 or name[lead - 1] == ".", last == len(name) or name[last] == "."
            if any(made[lead:last]) or (not ends and new.strip(".") in name and _stands_around(name, at, old, new)):
                kinds.add("cascade")
            elif not begins or not ends:
                kinds.add("tensor" if begins and name[last] == "_" and own[-1] in ("weight", "bias") else "inside")
            elif _stands_around(name, at, old, new):
                kinds.add("cascade")
            name, made, shard = name[:at] + new + name[end:], made[:at] + [True] * len(new) + made[end:], part
        return (name, shard), kinds


def _place(stage: str, name: str, old: str) -> int | None:
    if stage == "substr":
        return name.find(old) if old in name else None
    if stage == "prefix":
        return 0 if name.startswith(old) else None
    return len(name) - len(old) if name.endswith(old) else None


def _stands_around(name: str, at: int, old: str, new: str) -> bool:
    """Whether ``old`` at ``at`` is the ``old`` of a ``new`` that stands there already."""
    inner = [where for where in range(len(new) - len(old) + 1) if new.startswith(old, where)]
    return any(at >= where and name.startswith(new, at - where) for where in inner)


def _is_fused(parts: list[str], at: int, own: list[str], target: list[str]) -> bool:
    inner = [where for where in range(len(target) - len(own) + 1) if target[where : where + len(own)] == own]
    return any(at >= where and parts[at - where : at - where + len(target)] == target for where in inner)


# ---- The survey ------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    name: str
    source: str
    """``own`` (of a model in the mapper's module), ``published`` (some other model's layout), or ``made up``."""
    vllm: Result
    ours: Result
    kinds: tuple[str, ...]
    settled: bool
    """Whether ours gives vLLM's result in a module that has that name and not ours."""


@dataclass
class Row:
    found: Found
    names: int = 0
    real: int = 0
    differences: list[Difference] = field(default_factory=list)
    disagrees: list[str] = field(default_factory=list)
    """Names where both give the same but this file's reading of our contract does not."""
    astray: list[str] = field(default_factory=list)
    """Published names that ours reads otherwise than vLLM in a module that has all of vLLM's results."""
    raised: list[str] = field(default_factory=list)
    findings: list[Any] = field(default_factory=list)
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def counts(self) -> Counter[str]:
        return Counter(kind for difference in self.differences for kind in difference.kinds)

    def of(self, source: str) -> int:
        return sum(each.source == source for each in self.differences)

    @property
    def example(self) -> Difference:
        sources, kinds = (
            ("own", "published", "made up"),
            ("other", "tensor", "cascade", "inside", "doubled", "edge", "order"),
        )
        return min(
            self.differences,
            key=lambda each: (sources.index(each.source), kinds.index(each.kinds[0]), len(each.name)),
        )


def survey(found: Found, common: Sequence[str], rng: random.Random) -> Row:
    row = Row(found)
    try:
        ours = WeightsMapper.like(found.theirs)
    except Exception as error:
        row.raised.append(f"WeightsMapper.like(vLLM's): {error!r}")
        ours = found.with_plain_patterns()
    names = dict.fromkeys(derived(found, rng), "made up") | dict.fromkeys(common, "published")
    names |= dict.fromkeys(_own_layout(found), "own")
    row.names, row.real = len(names), sum(source != "made up" for source in names.values())
    _compare(row, ours, names)
    _in_its_module(row, ours)
    _lint(row, ours)
    return row


def _own_layout(found: Found) -> Iterator[str]:
    """The names of the mapper's own models, and those that submodules see of them."""
    for layout in _own(found):
        names = [*layout.names, *layout.published]
        yield from names if found.is_backend else stripped(names)


def _own(found: Found) -> list[Layout]:
    """The layouts of the models that live in the mapper's modules."""
    if found.is_backend:
        return [_LAYOUTS[found.label.removeprefix(BACKEND)]]
    return [_LAYOUTS[arch] for arch, module in _registered() if module in found.modules and arch in _LAYOUTS]


@cache
def _registered() -> list[tuple[str, str]]:
    from vllm.model_executor.models.registry import ModelRegistry

    return [(arch, getattr(each, "module_name", "")) for arch, each in ModelRegistry.models.items()]


def _compare(row: Row, ours: WeightsMapper, names: Mapping[str, str]) -> None:
    rules, theirs = Rules(row.found), row.found.theirs._map_name_with_shard
    start = time.thread_time()
    vllm = [theirs(name) for name in names]
    between = time.thread_time()
    mapped = [_attempt(row, ours, name) for name in names]
    row.seconds = between - start, time.thread_time() - between
    for (name, source), their, our in zip(names.items(), vllm, mapped, strict=True):
        result, kinds = rules.play(name)
        if their == our:
            row.disagrees += [name] if result != our else []
            continue
        explained = sorted(kinds, key=list(KINDS).index) if result == our and kinds else ["other"]
        row.differences.append(Difference(name, source, their, our, tuple(explained), _settled(ours, name, their)))


def _attempt(row: Row, ours: WeightsMapper, name: str) -> Result:
    try:
        mapped = ours.map(name)
    except Exception as error:
        row.raised.append(f"map({name!r}): {error!r}")
        return None
    return None if mapped is None else (mapped.name, mapped.shard)


def _settled(ours: WeightsMapper, name: str, their: Result) -> bool:
    if their is None:
        return False
    return ours.read(name, {their[0]}.__contains__).mapped == Mapped(*their)


def _in_its_module(row: Row, ours: WeightsMapper) -> None:
    """Whether ours, told what vLLM makes of a model's published names, arrives at the same."""
    for layout in _own(row.found):
        results = {name: row.found.theirs._map_name_with_shard(name) for name in layout.published}
        home = {result[0] for result in results.values() if result}
        for name, result in results.items():
            mapped = ours.read(name, home.__contains__).mapped
            row.astray += [name] if (None if mapped is None else tuple(mapped)) != result else []


def _lint(row: Row, ours: WeightsMapper) -> None:
    """Findings by each of the mapper's models' published names; by the rules alone where no such model is known."""
    owner = next((each for each in row.found.owners if hasattr(each, "named_parameters")), None)
    for names in [layout.published for layout in _own(row.found)] or [[]]:
        try:
            findings = ours.lint(names, module=owner)
        except Exception as error:
            row.raised.append(f"lint(names, module={getattr(owner, '__name__', owner)}): {error!r}")
            findings = [*ours.lint(names), *(each for each in ours.lint((), owner) if each.kind == "packed")]
        row.findings += [each for each in findings if each not in row.findings]


# ---- Telling ---------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row], imports: Imports, skipped: Sequence[Found], seconds: float) -> list[str]:
    differing = [row for row in rows if row.differences]
    theirs, ours = (sum(row.seconds[at] for row in rows) for at in (0, 1))
    names = sum(row.names for row in rows)
    classes = {owner for row in rows for owner in row.found.owners}
    groups = Counter(_group(row.found) for row in rows)
    return [
        "# vLLM's mappers beside ours",
        "",
        f"{len(rows)} mappers ({', '.join(f'{count} {group}' for group, count in groups.items())}), "
        f"{sum(len(row.found.labels) for row in rows)} places that hold one, {len(classes)} classes; {names:,} names tried, "
        f"{sum(row.real for row in rows):,} of them published or of a transformers class.",
        f"{len(differing)} mappers differ, on {sum(len(row.differences) for row in rows):,} names; "
        f"{sum(row.of('published') for row in rows):,} of those names are published for other models, "
        f"{sum(row.of('own') for row in rows):,} for the mapper's own. "
        f"Ours raised {sum(len(row.raised) for row in rows)} times; this file's reading of our contract disagreed "
        f"{sum(len(row.disagrees) for row in rows)} times where both mappers agree. "
        f"{sum(len(row.astray) for row in rows)} published names go elsewhere when the module is known.",
        f"Mapping took vLLM {theirs:.1f} s and us {ours:.1f} s ({1e6 * theirs / names:.1f} and {1e6 * ours / names:.1f} µs a "
        f"name); the survey {seconds:.0f} s.",
        "",
        *kinds_table(rows),
        "",
        *mapper_table(differing),
        "",
        *slow_table(rows),
        "",
        *lint_table(rows),
        "",
        *trouble(rows),
        *import_lines(imports, skipped),
    ]


def _group(found: Found) -> str:
    if found.is_backend:
        return "of its transformers backend"
    if found.label.endswith("()"):
        return "of quantisations"
    return "made in functions" if " in " in found.label else "of classes and modules"


def kinds_table(rows: Sequence[Row]) -> list[str]:
    head = "| kind | what happened | names | published | own | module settles | mappers | which is right |"
    lines = [head, "|---|---|--:|--:|--:|--:|--:|---|"]
    for kind, what in KINDS.items():
        hits = [(row, each) for row in rows for each in row.differences if kind in each.kinds]
        sources = Counter(each.source for _, each in hits)
        counts = [len(hits), sources["published"], sources["own"], sum(each.settled for _, each in hits)]
        counts.append(len({id(row) for row, _ in hits}))
        lines.append(f"| {kind} | {what} | {' | '.join(f'{count:,}' for count in counts)} | {VERDICTS[kind]} |")
    return lines


def mapper_table(rows: Sequence[Row]) -> list[str]:
    head = ["mapper", "also in", "names", "published", "own", *KINDS, "example: name", "vLLM", "ours", "right"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        example, counts = row.example, row.counts
        cells = [row.found.label, str(len(row.found.labels) - 1 or ""), f"{row.names:,}"]
        cells += [str(row.of(source) or "") for source in ("published", "own")]
        cells += [str(counts[kind] or "") for kind in KINDS]
        cells += [f"`{example.name}`", _show(example.vllm), _show(example.ours)]
        cells.append(VERDICTS[example.kinds[0]].partition(":")[0].partition(";")[0].partition(",")[0])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def slow_table(rows: Sequence[Row]) -> list[str]:
    slowest = sorted(rows, key=lambda row: row.seconds[1] / max(row.names, 1), reverse=True)[:6]
    lines = ["| slowest of ours | rules | names | vLLM µs a name | ours |", "|---|--:|--:|--:|--:|"]
    for row in slowest:
        rules = sum(len(getattr(row.found.theirs, f"orig_to_new_{stage}")) for stage in STAGES)
        each = [1e6 * seconds / max(row.names, 1) for seconds in row.seconds]
        lines.append(f"| {row.found.label} | {rules} | {row.names:,} | {each[0]:.1f} | {each[1]:.1f} |")
    return lines


def lint_table(rows: Sequence[Row]) -> list[str]:
    by_kind: dict[str, list[tuple[Row, Any]]] = defaultdict(list)
    for row in rows:
        for finding in row.findings:
            by_kind[finding.kind].append((row, finding))
    lines = ["| lint | findings | mappers | examples |", "|---|--:|--:|---|"]
    for kind, hits in sorted(by_kind.items()):
        mappers = {row.found.label: finding for row, finding in reversed(hits)}
        shown = [f"{label}: {finding.rule} {finding.message}" for label, finding in list(mappers.items())[::-1][:3]]
        lines.append(f"| {kind} | {len(hits):,} | {len(mappers)} | {'<br>'.join(shown)} |")
    return lines


def trouble(rows: Sequence[Row]) -> list[str]:
    raised: dict[str, list[str]] = defaultdict(list)
    for what in (what for row in rows for what in row.raised):
        raised[re.sub(r"(lint|map)\(.*?\): ", r"\1(...): ", what).partition(", found")[0]].append(what)
    lines = [f"* ours raised, {len(each)} times: {what}, first: {each[0]}" for what, each in raised.items()]
    others = [(row, each) for row in rows for each in row.differences if "other" in each.kinds]
    lines += [
        f"* other: {row.found.label}: `{each.name}`: {_show(each.vllm)}, ours {_show(each.ours)}"
        for row, each in others[:20]
    ]
    lines += [f"* elsewhere in its module: {row.found.label}: {row.astray[:3]}" for row in rows if row.astray]
    lines += [f"* contract read differently: {row.found.label}: {row.disagrees[:3]}" for row in rows if row.disagrees]
    return [*lines, ""] if lines else []


def import_lines(imports: Imports, skipped: Sequence[Found]) -> list[str]:
    wanted = Counter(re.sub("^.*No module named ", "no ", why) for why in imports.helped.values())
    lines = [f"* {count} modules imported with a stand-in only: {why}" for why, count in wanted.items()]
    lines += [f"* not imported: {name}: {why}" for name, why in imports.failed.items()] or [
        "* every module was imported"
    ]
    return [*lines, *(f"* could not be rebuilt: {each.label}" for each in skipped)]


def _show(result: Result) -> str:
    if result is None:
        return "dropped"
    return f"`{result[0]}`" + ("" if result[1] is None else f" {result[1]!r}")


def as_json(rows: Sequence[Row], imports: Imports, skipped: Sequence[Found]) -> dict[str, Any]:
    return {
        "mappers": [
            {
                "labels": row.found.labels,
                "names": row.names,
                "real": row.real,
                "seconds": row.seconds,
                "kinds": row.counts,
                "differences": [each._asdict() for each in row.differences],
                "findings": [each._asdict() for each in row.findings],
                "raised": row.raised,
                "disagrees": row.disagrees,
                "astray": row.astray,
            }
            for row in rows
        ],
        "imports": imports._asdict(),
        "skipped": [each.label for each in skipped],
    }


def _quiet() -> None:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def main() -> int:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    options = parser.parse_args()
    _quiet()
    start = time.perf_counter()
    imports = import_models()
    _LAYOUTS.update(layouts())
    found = collect()
    skipped = [each for each in found if each.theirs is None]
    common, rng = published(), random.Random(0)
    rows = [survey(each, common, rng) for each in found if each.theirs is not None]
    text = "\n".join(summary(rows, imports, skipped, time.perf_counter() - start))
    print(text)
    if options.markdown:
        with open(options.markdown, "w") as file:
            file.write(f"{text}\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(as_json(rows, imports, skipped), file, indent=1, default=str)
    return int(any(row.raised or row.astray or row.counts["other"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
