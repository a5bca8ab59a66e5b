"""Suspicious rules are found, and good ones are not."""

from typing import ClassVar

from torch import nn

from streamload import WeightsMapper
from streamload.testing import module_of


def kinds(mapper, names=(), module=None):
    return {(finding.kind, finding.rule.split(" ")[0]) for finding in mapper.lint(names, module)}


def test_a_clean_mapper_has_no_findings():
    mapper = WeightsMapper(orig_to_new_prefix={"model.": "body."}, orig_to_new_suffix={".gamma": ".weight"})
    assert mapper.lint(["model.a.gamma"]) == []


def test_rules_that_cascade_as_raw_text():
    mapper = WeightsMapper(orig_to_new_stacked={"q_proj": ("qkv_proj", "q"), "v_proj": ("qkv_proj", "v")})
    [finding, own] = mapper.lint()
    assert finding.kind == own.kind == "own-output"
    assert "would also hit what 'q_proj' makes ('qkv_proj')" in finding.message


def test_rules_that_never_fire_and_that_are_shadowed():
    mapper = WeightsMapper(orig_to_new_prefix={"model.": "x.", "model.vision.": "v."})
    assert ("shadowed", "prefix") in kinds(mapper)
    assert ("never-fires", "prefix") in kinds(mapper, ["model.vision.w"])
    assert (
        kinds(WeightsMapper(orig_to_new_prefix={"model.vision.": "v.", "model.": "x."}), ["model.vision.w", "model.w"])
        == set()
    )


def test_a_hit_inside_a_component():
    mapper = WeightsMapper(orig_to_new_suffix={"head.weight": "lm.weight"})
    [finding] = mapper.lint(["overhead.weight"])
    assert (finding.kind, "overhead.weight" in finding.message) == ("inside-component", True)


def test_the_empty_prefix_is_not_inside_anything_and_a_class_has_no_names_yet():
    mapper = WeightsMapper(orig_to_new_prefix={"": "model."})
    assert kinds(mapper, ["embed_tokens.weight"], nn.Linear) == {("own-output", "prefix")}


def test_collisions_and_names_without_a_home():
    mapper = WeightsMapper(orig_to_new_prefix={"a.": "c.", "b.": "c."})
    found = mapper.lint(["a.w", "b.w"], {"c.ww": None})
    assert [finding.kind for finding in found] == ["not-in-module", "not-in-module", "collision"]
    assert "close: c.ww" in found[0].message


def test_stacked_rules_against_what_the_class_packs():
    class Packs(type(module_of({}))):
        packed_modules_mapping: ClassVar = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }

    mapper = WeightsMapper(
        orig_to_new_stacked={"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "kv_b": ("other", 0)}
    )
    messages = [finding.message for finding in mapper.lint((), Packs()) if finding.kind == "packed"]
    assert len(messages) == 3
    assert (
        "makes 'qkv_proj' of ['k_proj', 'q_proj', 'v_proj'], the stacked rules of ['k_proj', 'q_proj']" in messages[0]
    )
    assert "packs 'gate_up_proj', but no stacked rule fills it" in messages[1]
    assert "'other', which packed_modules_mapping does not list" in messages[2]


def test_swapped_parts_are_told_and_what_does_no_harm_comes_last():
    rules = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "v"), "self.value": ("qkv_proj", "k")}
    findings = WeightsMapper(orig_to_new_stacked=rules).lint()
    assert [(each.kind, each.message) for each in findings if each.kind == "parts"] == [
        ("parts", "'k_proj' goes to part 'v', not 'k'"),
        ("parts", "'value' goes to part 'k', not 'v'"),
    ]
    kinds = [each.kind for each in findings]
    assert kinds == sorted(kinds, key="own-output".__eq__)
    right = {f"{part}_proj": ("qkv_proj", part) for part in "qkv"}
    assert {each.kind for each in WeightsMapper(orig_to_new_stacked=right).lint()} == {"own-output"}
