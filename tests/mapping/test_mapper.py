"""Rules: order, raw matching, no cascades, one stacked rule a name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload import Mapped, MappingError, WeightsMapper
from streamload.mapping import Expert

QKV = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}
GATE_UP = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


def test_stages_run_in_vllms_order_and_see_each_others_results():
    mapper = WeightsMapper(
        orig_to_new_regex={re.compile(r"\.(\d+)\.x"): r".\1.y"},
        orig_to_new_substr={"y.": "z."},
        orig_to_new_stacked={"q": ("qkv", "q")},
        orig_to_new_prefix={"m.": "n."},
        orig_to_new_suffix={".w": ".weight"},
    )
    assert mapper.map("m.3.x.q.w") == Mapped("n.3.z.qkv.weight", "q")
    assert [step.stage for step in mapper.explain("m.3.x.q.w").fired] == [
        "regex",
        "substr",
        "stacked",
        "prefix",
        "suffix",
    ]


def test_regex_replaces_all_matches_and_substr_the_first():
    assert (
        WeightsMapper(orig_to_new_regex={r"layers\.(\d+)": r"blocks.\1"})("layers.0.layers.1.w")
        == "blocks.0.blocks.1.w"
    )
    assert WeightsMapper(orig_to_new_substr={"blk": "layers"})("blk.0.blk.1") == "layers.0.blk.1"


def test_two_regex_rules_with_groups_keep_their_own_numbers():
    mapper = WeightsMapper(
        orig_to_new_regex={r"layers\.(\d+)\.lin": r"layers.\1.linear", r"heads\.(\d+)\.w$": r"heads.\1.weight"}
    )
    assert mapper("layers.3.lin.weight") == "layers.3.linear.weight"
    assert mapper("heads.1.w") == "heads.1.weight"
    assert mapper("layers.0.layers.1.lin.weight") == "layers.0.layers.1.linear.weight"


def test_patterns_of_the_regex_package_are_kept_as_they_are():
    regex = pytest.importorskip("regex")
    rules = {regex.compile(r"^bert\.(.+)"): r"model.\1"}
    mapper = WeightsMapper(orig_to_new_regex=rules)
    assert mapper("bert.w") == "model.w"
    with pytest.raises(MappingError, match="it has 0 groups, no number 2"):
        WeightsMapper(orig_to_new_regex={regex.compile("a"): r"\2"})
    assert (mapper | WeightsMapper(orig_to_new_regex={r"^bert\.(.+)": r"model.\1"}))("bert.w") == "model.w"


def test_none_drops_in_every_stage_that_has_it():
    for stage, old in (("regex", "^a"), ("substr", "b"), ("prefix", "a"), ("suffix", "c")):
        mapper = WeightsMapper(**{f"orig_to_new_{stage}": {old: None}})
        assert mapper.map("a.b.c") is None
        assert mapper("x") == "x"


def test_raw_matching_as_real_mappers_need_it():
    mapper = WeightsMapper(orig_to_new_prefix={"audio": None})
    assert mapper("audio_projection_layer.weight") is None


@pytest.mark.parametrize("dots", ["", "."])
def test_stacked_rules_do_not_cascade(dots):
    mapper = WeightsMapper(
        orig_to_new_stacked={dots + old: (dots + new, shard) for old, (new, shard) in (QKV | GATE_UP).items()}
    )
    assert mapper.map("attn.q_proj.weight") == ("attn.qkv_proj.weight", "q")
    assert mapper.map("attn.k_proj.weight") == ("attn.qkv_proj.weight", "k")
    assert mapper.map("attn.v_proj.weight") == ("attn.qkv_proj.weight", "v")
    assert mapper.map("q_proj.weight") == ("qkv_proj.weight", "q")
    assert mapper.map("mlp.gate_proj.weight") == ("mlp.gate_up_proj.weight", 0)
    for name in (
        "attn.qkv_proj.weight",
        "mlp.gate_up_proj.weight",
        "attn.my_q_proj_norm.weight",
        "attn.q_proj_norm.weight",
    ):
        assert mapper.map(name) == (name, None)


def test_the_most_specific_stacked_rule_fires_and_only_it():
    mapper = WeightsMapper(
        orig_to_new_stacked={"up": ("gate_up", 1), "shared.up": ("shared.merged", "u"), "b": ("c", 0)}
    )
    assert mapper.map("x.shared.up.b.w") == ("x.shared.merged.b.w", "u")
    assert mapper.map("x.up.w") == ("x.gate_up.w", 1)


def test_rules_that_name_every_layer():
    rules = {
        f"model.layers.{n}.attn.{p}_proj": (f"model.layers.{n}.attn.qkv_proj", p) for n in range(40) for p in "qkv"
    }
    mapper = WeightsMapper(orig_to_new_stacked=rules)
    for n in range(40):
        assert mapper.map(f"model.layers.{n}.attn.k_proj.weight") == (f"model.layers.{n}.attn.qkv_proj.weight", "k")
        assert mapper.map(f"model.layers.{n}.attn.o_proj.weight") == (f"model.layers.{n}.attn.o_proj.weight", None)
    assert mapper.map("model.layers.40.attn.k_proj.weight") == ("model.layers.40.attn.k_proj.weight", None)
    tried = mapper._engine._stacked._at("model", False)
    assert tried == []  # 120 rules have it, so none is looked for by it


def test_a_stacked_rule_whose_target_the_module_lacks_leaves_the_name():
    mapper = WeightsMapper(orig_to_new_stacked=QKV)
    home = {"language.qkv_proj.weight", "vision.q_proj.weight"}
    assert mapper.read("language.q_proj.weight", home.__contains__).mapped == ("language.qkv_proj.weight", "q")
    assert mapper.read("vision.q_proj.weight", home.__contains__).mapped == ("vision.q_proj.weight", None)
    assert "the module has no 'vision.qkv_proj.weight'" in str(mapper.explain("vision.q_proj.weight", home))


def test_a_last_component_matches_before_an_underscore_where_the_module_has_the_target():
    mapper = WeightsMapper(orig_to_new_stacked={".q_proj.weight": (".qkv_proj.weight", "q")})
    home = {"a.qkv_proj.weight", "a.qkv_proj.weight_scale"}
    assert mapper.read("a.q_proj.weight_scale", home.__contains__).mapped == ("a.qkv_proj.weight_scale", "q")
    assert mapper.map("a.q_proj.weight_scale") == ("a.q_proj.weight_scale", None)


def test_part_ids_of_every_kind():
    mapper = WeightsMapper(
        orig_to_new_stacked={"a": ("f", (0, 1)), "b": ("f", [2, 3]), "e.*.w": ("e.w", None), "e.*.u": ("e.gu", 1)}
    )
    assert mapper.map("a.x") == ("f.x", (0, 1))
    assert mapper.map("b.x") == ("f.x", [2, 3])
    assert mapper.map("e.17.w") == ("e.w", Expert(17, None))
    assert mapper.map("l.0.e.3.u") == ("l.0.e.gu", Expert(3, 1))
    assert mapper.map("e.x.w") == ("e.x.w", None)


@pytest.mark.parametrize(
    ("stage", "rules", "name", "right"),
    [
        ("suffix", {"head.weight": "lm_head.weight"}, "lm_head.weight", "lm_head.weight"),
        ("suffix", {"head.weight": "lm_head.weight"}, "x.head.weight", "x.lm_head.weight"),
        ("suffix", {"head.weight": "lm_head.weight"}, "overhead.weight", "overlm_head.weight"),
        ("prefix", {"": "model."}, "model.layers.0.w", "model.layers.0.w"),
        ("prefix", {"": "model."}, "layers.0.w", "model.layers.0.w"),
        ("substr", {"v_proj": "qkv_proj"}, "a.qkv_proj.w", "a.qkv_proj.w"),
        ("regex", {r"^model\.": "model.text."}, "model.text.x", "model.text.x"),
        ("regex", {r"^model\.(.+)": r"model.text.\1"}, "model.text.x", "model.text.x"),
        ("regex", {r"^(.+)$": r"model.\1"}, "model.x", "model.x"),
        ("regex", {r"^(\w+)\.(\w+)$": r"\2.\1"}, "a.b", "b.a"),
    ],
)
def test_no_rule_fires_on_its_own_output(stage, rules, name, right):
    mapper = WeightsMapper(**{f"orig_to_new_{stage}": rules})
    assert mapper(name) == right


def test_prefix_rules_in_order_with_the_empty_prefix():
    mapper = WeightsMapper(
        orig_to_new_prefix={"": "model.", "model.model.": "model.", "model.score": "score", "model.classifier": "score"}
    )
    for name in ("layers.0.w", "model.layers.0.w", "model.model.layers.0.w"):
        assert mapper(name) == "model.layers.0.w"
    assert mapper("score.weight") == mapper("classifier.weight") == "score.weight"
    assert mapper("model.scores.weight") == "scores.weight"


def test_where_only_the_other_reading_is_at_home_it_wins():
    mapper = WeightsMapper(orig_to_new_prefix={"": "model."})
    assert mapper.read("model.w", {"model.model.w"}.__contains__).mapped == ("model.model.w", None)
    assert mapper.read("model.w", {"model.w", "model.model.w"}.__contains__).mapped == ("model.w", None)


PARTS = ["q_proj", "model", "layers", "0", "w", "head", "qkv_proj"]
names = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5, unique=True).map(".".join).map(".".join)


@given(names)
def test_then_is_composition(name):
    first = WeightsMapper(orig_to_new_prefix={"model.": ""}, orig_to_new_substr={"head": "lm_head"})
    second = WeightsMapper(orig_to_new_stacked=QKV, orig_to_new_suffix={".0": None}, orig_to_new_prefix={"": "model."})
    middle = first(name)
    assert first.then(second)(name) == (None if middle is None else second(middle))


@given(names)
def test_mapping_what_was_mapped_changes_nothing(name):
    mapper = WeightsMapper(
        orig_to_new_stacked=QKV, orig_to_new_prefix={"": "model."}, orig_to_new_suffix={"head": "lm_head"}
    )
    once = mapper(name)
    assert mapper(once) == once


def test_two_parts_in_a_row_are_refused():
    first = WeightsMapper(orig_to_new_stacked={"a": ("b", 0)})
    second = WeightsMapper(orig_to_new_stacked={"b": ("c", 1)})
    with pytest.raises(MappingError, match="a tensor can be fused once"):
        first.then(second).map("a.w")


def test_merging_refuses_to_replace_a_rule():
    first = WeightsMapper(orig_to_new_prefix={"a.": "b.", "x": None})
    with pytest.raises(MappingError, match=r"'a.' becomes 'b.' in the one mapper and 'c.' in the other.*override"):
        first | WeightsMapper(orig_to_new_prefix={"a.": "c."})
    with pytest.raises(MappingError, match="'x' becomes None"):
        first | WeightsMapper(orig_to_new_prefix={"x": "y"})
    both = first | WeightsMapper(orig_to_new_prefix={"a.": "b.", "z.": ""}, orig_to_new_stacked=QKV)
    assert both("a.w") == "b.w"
    assert both("x") is None
    assert both("z.q_proj.w") == "qkv_proj.w"
    assert first.override(WeightsMapper(orig_to_new_prefix={"a.": "c."}))("a.w") == "c.w"
    assert first("a.w") == "b.w"


def test_renames_only_for_those_who_name_modules():
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "language_model.model.", "lm_head": None}, orig_to_new_stacked=QKV
    )
    view = mapper.renames_only()
    assert view.apply_list(["model.language_model.layers.0.self_attn.q_proj", "lm_head"]) == [
        "language_model.model.layers.0.self_attn.q_proj",
        "lm_head",
    ]


def test_a_table_in_which_two_names_become_one_is_refused():
    mapper = WeightsMapper(orig_to_new_prefix={"a.": "c.", "b.": "c."})
    assert mapper.apply_dict({"a.x": 1, "b.y": 2}) == {"c.x": 1, "c.y": 2}
    with pytest.raises(MappingError, match=r"'a.x' and 'b.x' both map to 'c.x'"):
        mapper.apply_dict({"a.x": 1, "b.x": 2})


@pytest.mark.parametrize(
    "rules",
    [
        {"orig_to_new_suffix": {"": "x"}},
        {"orig_to_new_prefix": {"a": 1}},
        {"orig_to_new_prefix": ["a"]},
        {"orig_to_new_regex": {"(": "x"}},
        {"orig_to_new_regex": {"a": r"\2"}},
        {"orig_to_new_stacked": {"a": "b"}},
        {"orig_to_new_stacked": {"a": ("b", None)}},
        {"orig_to_new_stacked": {"a": ("b", True)}},
        {"orig_to_new_stacked": {"a": ("b", ())}},
        {"orig_to_new_stacked": {"a.*": ("b", (0, 1))}},
        {"orig_to_new_stacked": {"*": ("b", None)}},
        {"orig_to_new_renaming": ["x"]},
        {"split": {"a": ("b",)}},
        {"split": {"a": "bc"}},
    ],
)
def test_what_is_no_rule_is_refused(rules):
    with pytest.raises(MappingError):
        WeightsMapper(**rules)


def test_many_literal_rules_agree_with_one_after_the_other():
    rules = {f"{a}{b}": f"<{b}{a}>" for a in "abcdef" for b in "abcdef"}
    mapper = WeightsMapper(orig_to_new_substr=rules)
    for name in ("abcdef", "ffff.ab", "zz", "cab.fed"):
        expected = name
        for old, new in rules.items():
            expected = expected.replace(old, new, 1)
        assert mapper(name) == expected


def test_the_explanation_reads_line_by_line():
    mapper = WeightsMapper(orig_to_new_prefix={"a.": "b."}, orig_to_new_suffix={".w": ".weight"})
    assert (
        str(mapper.explain("a.w"))
        == "a.w\n  prefix 'a.' -> 'b.': b.w\n  suffix '.w' -> '.weight': b.weight\n= b.weight"
    )
    told = mapper.explain("a.w", {"b.weight_g"})
    assert told.at_home is False
    assert "NOT in the module" in str(told)


def test_a_callable_follows_a_mapper_and_what_is_none_is_refused():
    mapper = WeightsMapper(orig_to_new_prefix={"a.": "b."}).then(lambda name: None if "drop" in name else name.upper())
    assert [mapper.map_name(name) for name in ("a.x", "a.drop")] == ["B.X", None]
    assert mapper.explain("a.x").steps[-1].after == "B.X"
    with pytest.raises(MappingError, match=r"expected a WeightsMapper.*found NoneType"):
        mapper.then(None)
    with pytest.raises(MappingError, match=r"use first.then\(second\)"):
        mapper | WeightsMapper()
    with pytest.raises(MappingError, match=r"merge with, found function; use first.then"):
        WeightsMapper() | (lambda name: name)
    with pytest.raises(MappingError, match="found dict"):
        WeightsMapper().override({})
    with pytest.raises(MappingError, match="turns 'x' into 3; expected a name"):
        WeightsMapper().then(lambda name: 3).map_name("x")


def test_lint_of_composed_mappers_judges_each_by_what_the_one_before_it_makes():
    first = WeightsMapper(orig_to_new_prefix={"a.": "b."})
    second = WeightsMapper(orig_to_new_prefix={"a.": "c.", "b.": "d."})
    [finding] = first.then(second).lint(["a.x"], ["d.x"])
    assert (finding.kind, finding.rule) == ("never-fires", "prefix 'a.' -> 'c.'")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"split": 3}, "split: expected a dict, found int"),
        ({"split": {"a": 3}}, "split: expected text -> a list of different texts"),
        ({"split": {3: ["a", "b"]}}, "split: expected text -> a list of different texts"),
        ({"split": {"": ["a", "b"]}}, "split: expected text -> a list of different texts"),
        ({"split": {"a": ["b", "b"]}}, "split: expected text -> a list of different texts"),
        ({"transposed": "x"}, "transposed: expected a list, found str"),
        ({"transposed": [3]}, "transposed: expected globs of stored names, found 3"),
        ({"orig_to_new_renaming": 3}, "orig_to_new_renaming: expected a list, found int"),
        ({"orig_to_new_stacked": {"a": ("", 0)}}, "expected .name of the fused parameter, part., found"),
        ({"orig_to_new_stacked": {"a": ("b", -1)}}, "an int from 0 on"),
    ],
)
def test_what_is_no_rule_is_told_when_the_mapper_is_made(rules, message):
    with pytest.raises(MappingError, match=message):
        WeightsMapper(**rules)


def test_lint_of_a_single_name_is_refused():
    with pytest.raises(MappingError, match=r"found the single string 'a\.b'"):
        WeightsMapper().lint("a.b")
