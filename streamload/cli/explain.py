"""``streamload explain``: what becomes of one stored tensor, or what fills one parameter, and by which rule."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from streamload.checkpoint import Checkpoint, TensorSpec
from streamload.cli import options
from streamload.cli.draw import print_json, print_rows, size
from streamload.errors import StreamloadError
from streamload.mapping.composed import Named
from streamload.mapping.explain import close_to
from streamload.mapping.mapper import WeightsMapper

if TYPE_CHECKING:
    from torch import nn

    from streamload.loading import LoadPlan
    from streamload.loading.placement import Placement, Region

_SHOWN = 24


@click.command("explain")
@options.location
@click.argument("name")
@options.as_json
@options.revision
@click.option("--base", is_flag=True, help="Explain for the model without its head (transformers' AutoModel).")
@click.option(
    "--mapper",
    metavar="MODULE:OBJECT",
    help="Ask only this mapper, and no model: a WeightsMapper, vLLM's, or a class that has one. MODULE is imported.",
)
def command(location: str, name: str, as_json: bool, revision: str | None, base: bool, mapper: str | None) -> None:
    """Say what becomes of NAME, a tensor of the checkpoint at LOCATION or a parameter of its model.

    Exit code 1 when the tensor finds no place, or the parameter nothing that fills it. With --mapper NAME is a stored tensor,
    and the answer is what the rules make of it, wherever that may be.
    """
    checkpoint = Checkpoint.open(location, revision=revision)
    found = _by_mapper(checkpoint, name, mapper) if mapper is not None else _by_plan(checkpoint, name, base)
    if as_json:
        print_json(found.pop("json"))
    else:
        print_rows(name, found["rows"])
    sys.exit(0 if found["fine"] else 1)


def _by_mapper(checkpoint: Checkpoint, name: str, path: str) -> dict[str, Any]:
    """Where a mapper that the user names puts a stored name, step by step."""
    if name not in checkpoint.tensors:
        raise _unknown(checkpoint, name, ())
    explanation = _mapper_at(path).explain(name)
    mapped = explanation.mapped
    steps = [(step.stage, str(step.rule), step.after, step.why) for step in explanation.steps]
    rows = [("stored", _stored(checkpoint.tensors[name]))]
    rows += [("", line.strip()) for line in str(explanation).splitlines()[1:]]
    return {
        "rows": rows,
        "fine": True,
        "json": {
            "name": name,
            "mapped": None if mapped is None else mapped.name,
            "shard": None if mapped is None or mapped.shard is None else str(mapped.shard),
            "steps": [dict(zip(("stage", "rule", "after", "why"), step, strict=True)) for step in steps],
        },
    }


def _mapper_at(path: str) -> Named:
    module, separator, attribute = path.partition(":")
    if not separator:
        raise click.BadParameter(f"{path!r}: expected MODULE:OBJECT", param_hint="--mapper")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"{path!r}: {error}", param_hint="--mapper") from error
    found = getattr(found, "hf_to_vllm_mapper", found)
    if isinstance(found, Named):
        return found
    if hasattr(found, "orig_to_new_prefix") and hasattr(found, "orig_to_new_substr"):
        return WeightsMapper.like(found)
    raise click.BadParameter(f"{path!r}: no mapper, and none in it, but {type(found).__name__}", param_hint="--mapper")


def _by_plan(checkpoint: Checkpoint, name: str, base: bool) -> dict[str, Any]:
    """Where a load into the model that the folder names would put a stored name, and what would fill a parameter."""
    from streamload.integrations.transformers import build_model
    from streamload.loading import plan

    model = build_model(checkpoint, base=base)
    made = plan(model, checkpoint)
    own = made.known
    if name not in checkpoint.tensors and name not in own:
        raise _unknown(checkpoint, name, own)
    rows: list[tuple[str, str]] = [("model", type(model).__name__)]
    if name in checkpoint.tensors:
        rows += _rows_of_stored(checkpoint, made, name, _rule(model, checkpoint, name))
    if name in own:
        rows += _rows_of_parameter(model, made, name)
    rows += [("mismatched", f"expected {m.expected}, found {m.found}") for m in made.mismatched_keys if m.name == name]
    bad = [made.unexpected_keys, made.missing_keys, [each.name for each in made.mismatched_keys]]
    targets = dict.fromkeys(each.target for each in _from(made, name))
    return {
        "rows": rows,
        "fine": not any(name in names for names in bad) and any(label in _ANSWERS for label, _ in rows),
        "json": {
            "name": name,
            "model": type(model).__name__,
            "targets": list(targets),
            "sources": list(dict.fromkeys(each.spec.name for each in _into(made, name))),
            "rows": [{"what": label, "text": text} for label, text in rows],
        },
    }


#: Rows that say where a name goes, or what fills it.
_ANSWERS = ("goes to", "is compared with", "computed into", "dropped", "filled by", "computed from", "tied to")


def _rule(model: nn.Module, checkpoint: Checkpoint, name: str) -> str:
    """The rule under which ``name`` gets another one."""
    from streamload.loading.naming import Router
    from streamload.loading.targets import module_targets

    router = Router(module_targets(model, None), None)
    if router.conversions is not None:
        router.conversions.sort(list(checkpoint.tensors))
    return "" if router.trivial else router.route(name).rule


def _rows_of_stored(checkpoint: Checkpoint, made: LoadPlan, name: str, rule: str) -> list[tuple[str, str]]:
    rows = [("stored", _stored(checkpoint.tensors[name]))]
    by = f" by {rule}" if rule else ""
    rows += _capped([("goes to", _into_text(each) + by) for each in _from(made, name)])
    rows += [("is compared with", copy.target) for copy in made.copies if copy.placement.spec.name == name]
    for each in made.operations:
        if any(spec.name == name for spec in each.sources.values()):
            rows.append(("computed into", f"{', '.join(each.targets)} by {each.title}"))
    if name in made.dropped:
        rows.append(("dropped", made.dropped[name]))
    if name in made.unexpected_keys:
        rows.append(("unexpected", made.renamed.get(name, "the model has no parameter of this name")))
    return rows


def _rows_of_parameter(model: nn.Module, made: LoadPlan, name: str) -> list[tuple[str, str]]:
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    rows = []
    if name in tensors:
        rows.append(("parameter", f"{str(tensors[name].dtype).removeprefix('torch.')} {list(tensors[name].shape)}"))
    if name in made.tied:
        rows.append(("tied to", made.tied[name]))
    rows += _capped([("filled by", _from_text(each)) for each in _into(made, made.tied.get(name, name))])
    for each in made.operations:
        if name in each.targets:
            rows.append(("computed from", f"{', '.join(spec.name for spec in each.sources.values())} by {each.title}"))
    if name in made.dropped:
        rows.append(("dropped", made.dropped[name]))
    if name in made.missing_keys:
        rows.append(("missing", "nothing in the checkpoint fills it"))
        rows += [("parts", str(each)) for each in made.incomplete if each.name == name]
    return rows


def _from(made: LoadPlan, name: str) -> list[Placement]:
    return [each for each in made.placements if each.spec.name == name]


def _into(made: LoadPlan, name: str) -> list[Placement]:
    return [each for each in made.placements if each.target == name]


def _stored(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}, {size(spec.nbytes)} at {spec.offset:,} of {spec.file}"


def _into_text(placement: Placement) -> str:
    return f"{placement.target}{_region(placement.target_region)}{_part(placement.source_region)}"


def _from_text(placement: Placement) -> str:
    rows = _region(placement.target_region)
    return f"{placement.spec.name}{_region(placement.source_region)}{f' into {rows}' if rows else ''}"


def _part(region: Region | None) -> str:
    return f" from its {_region(region)}" if region is not None else ""


def _region(region: Region | None) -> str:
    return "" if region is None else "[" + ", ".join(f"{start}:{stop}" for start, stop in region) + "]"


def _capped(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    more = len(rows) - _SHOWN
    return rows if more <= 0 else [*rows[:_SHOWN], ("", f"and {more} more")]


def _unknown(checkpoint: Checkpoint, name: str, own: list[str] | tuple[str, ...]) -> StreamloadError:
    close = close_to(name, dict.fromkeys([*checkpoint.tensors, *own]))
    near = f"; close to it: {', '.join(close)}" if close else ""
    where = f"{checkpoint.location} stores no tensor {name!r}" + (
        ", and the model has no such parameter" if own else ""
    )
    return StreamloadError(where + near)
