"""Lists of names, made short for a person, and the guess at a prefix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streamload import load, plan
from streamload.loading.keys import Cast, Keys, Mismatch, prefix_hint, summarise
from streamload.testing import module_of, write_safetensors

LAYER = ["q.weight", "k.weight", "v.weight"]


def layers(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}layers.{number}.{name}" for number in range(count) for name in LAYER]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        (["a.b"], "a.b"),
        (["a.weight", "a.bias"], "a.weight, a.bias"),
        (["h.0.w", "h.1.w", "h.2.w"], "h.{0..2}.w (3)"),
        (["h.10.w", "h.9.w", "h.8.w"], "h.{8..10}.w (3)"),  # by number, not by letter
        (["h.0.w", "h.3.w"], "h.{0,3}.w (2)"),
        ([f"h.{number}.w" for number in range(0, 20, 2)], "h.{0,2,4,6,8,10,...}.w (10)"),
        (["0.w", "1.w", "2.w"], "{0..2}.w (3)"),
        (["a.0", "a.1"], "a.{0..1} (2)"),
        (["fc1.w", "fc2.w"], "fc1.w, fc2.w"),  # a digit in a word is no number
        (["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w", "l.1.e.1.w"], "l.{0..1}.e.{0..1}.w (4)"),
        (["l.0.e.5.w", "l.1.e.5.w"], "l.{0..1}.e.5.w (2)"),
    ],
)
def test_folding(names: list[str], expected: str):
    assert summarise(names) == expected


def test_names_of_24_layers_become_one_for_each_kind():
    text = summarise(layers(24))
    assert text == "layers.{0..23}.q.weight (24), layers.{0..23}.k.weight (24), layers.{0..23}.v.weight (24)"


def test_whole_branch():
    known = [*layers(3), "norm.weight"]
    missing = [name for name in known if name.startswith("layers.2.")]
    assert summarise(missing, known) == "layers.2.* (3)"
    assert summarise(missing[:2], known) == "layers.2.q.weight, layers.2.k.weight"


def test_whole_branches_fold_too():
    known = [*layers(4, "model."), "lm_head.weight"]
    missing = [name for name in known if "layers.1." in name or "layers.2." in name]
    assert summarise(missing, known) == "model.layers.{1..2}.* (6)"


def test_the_highest_whole_branch_wins():
    known = [*layers(4, "model."), "lm_head.weight"]
    assert summarise(known, known) == "model.* (12), lm_head.weight"  # a branch of one name stays a name


def test_a_branch_is_whole_only_by_dotted_components():
    known = ["layer.a", "layer.b", "layer2.a", "layer2.b"]
    assert summarise(["layer.a", "layer.b"], known) == "layer.* (2)"


def test_no_more_than_twelve_are_shown():
    names = [f"{letter}.w" for letter in "abcdefghijklmnop"]
    text = summarise(names)
    assert text == "a.w, b.w, c.w, d.w, e.w, f.w, g.w, h.w, i.w, j.w, k.w, l.w and 4 more"
    assert summarise(names[:12]).endswith("k.w, l.w")


def test_hint_when_the_checkpoint_lacks_a_prefix():
    hint = prefix_hint(layers(2, "model."), layers(2))
    assert hint is not None
    assert "add 'model.'? 6 names would then fit" in hint


def test_hint_when_the_checkpoint_has_a_prefix_too_many():
    hint = prefix_hint(layers(2), layers(2, "model."))
    assert hint is not None
    assert "strip 'model.'? 6 names would then fit" in hint


def test_hint_when_the_prefix_is_doubled():
    hint = prefix_hint(layers(2, "model."), layers(2, "model.model."))
    assert hint is not None
    assert "strip 'model.'? 6 names would then fit" in hint
    hint = prefix_hint(layers(2, "model.model."), layers(2, "model."))
    assert hint is not None
    assert "add 'model.'? 6 names would then fit" in hint


def test_hint_of_two_components():
    hint = prefix_hint(layers(2, "model.text."), layers(2))
    assert hint is not None
    assert "add 'model.text.'? 6 names" in hint
    hint = prefix_hint(layers(2), layers(2, "base_model.model."))
    assert hint is not None
    assert "strip 'base_model.model.'? 6 names" in hint


def test_the_prefix_that_helps_most_is_hinted():
    hint = prefix_hint([*layers(2, "model."), "other.head"], [*layers(2), "head"])
    assert hint is not None
    assert "add 'model.'? 6 names" in hint


@pytest.mark.parametrize(
    ("missing", "unexpected"),
    [([], []), (["a.w"], []), ([], ["a.w"]), (["a.weight"], ["b.weight"]), (["lm_head.weight"], ["score.weight"])],
)
def test_no_hint(missing: list[str], unexpected: list[str]):
    assert prefix_hint(missing, unexpected) is None


def test_problems_one_line_each():
    keys = Keys(
        missing_keys=layers(2, "model."),
        unexpected_keys=layers(2),
        mismatched_keys=[Mismatch(f"m{number}", "shape [1]", "shape [2]", "a.safetensors") for number in range(14)],
        known=[*layers(2, "model."), "model.norm", "model.layers.2.q.weight"],
    )
    missing, unexpected, *mismatched, more, hint = keys.problems()
    assert missing == "6 missing: model.layers.{0..1}.* (6)"  # two whole branches of three names
    assert unexpected.startswith("6 unexpected: layers.{0..1}.q.weight (2), ")
    assert mismatched == [
        f"mismatched: m{number}: expected shape [1], found shape [2] in a.safetensors" for number in range(12)
    ]
    assert more == "and 2 more mismatched"
    assert hint.startswith("add 'model.'? 6 names")
    assert not keys.ok
    assert Keys(dropped={"a": "mapper"}, casts=[Cast("b", "F32", "BF16", True)]).ok
    assert Keys().problems() == []


def test_lists_as_json():
    keys = Keys(
        missing_keys=["a"],
        mismatched_keys=[Mismatch("b", "F32", "I64", "f")],
        casts=[Cast("c", "F32", "BF16", True)],
        tied={"d": "e"},
    )
    told = json.loads(json.dumps(keys.keys_to_dict()))
    assert told["missing_keys"] == ["a"]
    assert told["mismatched_keys"] == [{"name": "b", "expected": "F32", "found": "I64", "file": "f"}]
    assert told["casts"] == [{"name": "c", "source": "F32", "target": "BF16", "narrows": True}]
    assert told["tied"] == {"d": "e"}
    assert "known" not in told  # as long as the model, and of no use to a reader


def test_a_plan_and_a_report_of_many_names_print_as_counts(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {f"layers.{n}": torch.ones(2) for n in range(300)})
    model = module_of({f"layers.{n}": torch.zeros(2) for n in range(299)})
    made = plan(model, path)
    assert repr(made).startswith("LoadPlan(299 placements, 2,392 bytes to read, Forecast(params_bytes=2392, ")
    assert repr(made).endswith("), 1 unexpected_keys)")
    report = load(model, path, strict=False)
    assert repr(report).startswith("LoadReport(2,392 of 2,392 bytes read in ")
    assert repr(report).endswith(" clones, 1 unexpected_keys)")
