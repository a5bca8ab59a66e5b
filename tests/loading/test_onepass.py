"""``load`` from a one-pass stream whose tensors are overwritten as soon as the next one is asked for."""

import gc
import weakref
from itertools import chain, permutations

import pytest
import torch
from torch import nn

from streamload import BudgetError, LoadError, MappingError, WeightsMapper, load, partial_load, plan, skeleton
from streamload.testing import RingSource, module_of, write_safetensors

QKV = {".q_proj": (".qkv_proj", "q"), ".k_proj": (".qkv_proj", "k"), ".v_proj": (".qkv_proj", "v")}
GATE_UP = {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}
MAPPER = WeightsMapper(orig_to_new_stacked=QKV | GATE_UP)


def rows(count, value, width=8, dtype=torch.float32):
    """``count`` rows that count up from ``value``."""
    return (torch.arange(count * width).reshape(count, width) + value * 1000).to(dtype)


def empty(shapes, **kwargs):
    return module_of({name: torch.full(shape, float("nan"), **kwargs) for name, shape in shapes.items()})


@pytest.fixture(params=[1, 2, 5])
def ring(request):
    return lambda tensors: RingSource(tensors, request.param)


def shuffled(tensors, order):
    names = sorted(tensors)
    if order == "reversed":
        names.reverse()
    elif order == "shuffled":
        names = [names[at] for at in torch.randperm(len(names), generator=torch.Generator().manual_seed(7)).tolist()]
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled"])
@pytest.mark.parametrize("meta", [False, True])
def test_every_tensor_in_its_place_and_no_clone(ring, order, meta):
    tensors = {f"layers.{n}.weight": rows(4, n) for n in range(12)} | {"scale": torch.tensor(3.0)}
    model = module_of({name: torch.empty_like(each, device="meta" if meta else None) for name, each in tensors.items()})
    source = ring(shuffled(tensors, order))
    report = load(model, source)
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter(name), tensor), name
    assert (report.clones, report.clone_bytes) == (0, 0)
    assert report.bytes_wanted == report.bytes_read == 12 * 4 * 8 * 4 + 4
    assert source.steps == 14
    assert report.ok


@pytest.mark.parametrize("order", [*permutations(["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"])])
def test_parts_in_every_order_held_only_until_their_place_is_known(ring, order):
    parts = {"a.q_proj.weight": rows(8, 1), "a.k_proj.weight": rows(4, 2), "a.v_proj.weight": rows(4, 3)}
    model = empty({"a.qkv_proj.weight": (16, 8)})
    report = load(model, ring({name: parts[name] for name in order}), mapper=MAPPER)
    assert torch.equal(model.a.qkv_proj.weight, torch.cat([*parts.values()]))
    # k alone has an unknown neighbour on either side; q lies at the start and v at the end, wherever k begins.
    assert report.clones == (1 if order[0] == "a.k_proj.weight" else 0)


def test_sizes_that_the_module_tells_need_no_clone(ring):
    parts = {"a.k_proj.weight": rows(4, 2), "a.q_proj.weight": rows(8, 1), "a.v_proj.weight": rows(4, 3)}
    model = empty({"a.qkv_proj.weight": (16, 8)})
    model.a.qkv_proj.output_sizes = [8, 4, 4]
    report = load(model, ring(parts), mapper=MAPPER)
    assert torch.equal(model.a.qkv_proj.weight, torch.cat([rows(8, 1), rows(4, 2), rows(4, 3)]))
    assert report.clones == 0


def test_a_clone_is_let_go_as_soon_as_it_is_in_place():
    sizes = {"q": 8, "k": 4, "v": 4}
    alive = []

    def stream():
        for part in ("k", "q", "v"):
            tensor = torch.full((sizes[part], 8), float(ord(part)))
            yield f"a.{part}_proj.weight", tensor
            reference = weakref.ref(tensor)
            del tensor
            gc.collect()
            alive.append(reference() is not None)

    model = empty({"a.qkv_proj.weight": (16, 8)})
    report = load(model, stream(), mapper=MAPPER)
    assert alive == [False, False, False]
    assert model.a.qkv_proj.weight[:, 0].tolist() == [ord("q")] * 8 + [ord("k")] * 4 + [ord("v")] * 4
    assert (report.clones, report.clone_bytes) == (1, 4 * 8 * 4)


@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled"])
def test_experts_spread_and_transposed_tensors_and_casts(ring, order):
    experts = {f"e.{n}.w{k}": rows(4, 10 * n + k) for n in range(5) for k in (1, 3)}
    others = {"c_fc.weight": rows(6, 7, 5), "attn.qkv.weight": rows(12, 8)}
    mapper = WeightsMapper(
        orig_to_new_stacked={"e.*.w1": ("e.w13", 0), "e.*.w3": ("e.w13", 1)},
        split={"qkv": ["q", "k", "v"]},
        transposed=["c_fc.*"],
    )
    shapes = {
        "e.w13": (5, 8, 8),
        "c_fc.weight": (5, 6),
        **{f"attn.{p}.weight": (n, 8) for p, n in zip("qkv", (6, 3, 3), strict=True)},
    }
    model = empty(shapes, dtype=torch.bfloat16)
    report = load(model, ring(shuffled(experts | others, order)), mapper=mapper)
    for n in range(5):
        assert torch.equal(model.e.w13[n], torch.cat([experts[f"e.{n}.w1"], experts[f"e.{n}.w3"]]).bfloat16())
    assert torch.equal(model.c_fc.weight, others["c_fc.weight"].T.bfloat16())
    whole = torch.cat([model.attn.q.weight, model.attn.k.weight, model.attn.v.weight])
    assert torch.equal(whole, others["attn.qkv.weight"].bfloat16())
    assert report.clones == 0  # two parts: each lies at an end
    assert {cast.narrows for cast in report.casts} == {True}
    assert len(report.casts) == 5


def test_what_has_to_be_held_stays_within_the_budget(ring):
    mapper = WeightsMapper(orig_to_new_stacked={f"{c}": ("abc", n) for n, c in enumerate("abc")})
    names = {f"{n}.b.weight": rows(64, n) for n in range(40)}
    model = empty({f"{n}.abc.weight": (192, 8) for n in range(40)})
    with pytest.raises(
        BudgetError, match=r"'9.b.weight' cannot be put into 9.abc.weight before other tensors.*20,479 bytes"
    ) as caught:
        load(model, ring(names), mapper=mapper, memory_limit=10 * 64 * 8 * 4 - 1)
    assert "since '0.b.weight'" in str(caught.value)
    assert partial_load(model) is None  # nothing had been written


def test_missing_unexpected_and_mismatched_are_told_at_the_end_and_the_module_is_marked(ring):
    model = module_of({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)})
    tensors = {"x": torch.ones(2), "a": torch.ones(2), "c": torch.ones(3)}
    with pytest.raises(LoadError) as caught:
        load(model, ring(tensors))
    text = str(caught.value)
    assert text.startswith(
        "the checkpoint does not fit Module (1 missing, 1 unexpected, 1 mismatched); what fits was written"
    )
    assert "mismatched: c: expected shape [2], found shape [3] in the stream" in text
    assert caught.value.report.missing_keys == ["b"]
    assert partial_load(model) is not None
    report = load(model, ring(tensors), strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["b"], ["x"])
    assert model.a.tolist() == [1, 1]
    assert model.b.tolist() == [0, 0]
    report = load(model, ring({**tensors, "c": torch.full((2,), 4.0)}), ignore_missing=["b"], ignore_unexpected=["x"])
    assert report.dropped == {"x": "ignore_unexpected 'x'", "b": "ignore_missing 'b'"}
    assert partial_load(model) is None


def test_a_mark_stays_until_what_was_written_in_part_is_loaded(ring):
    model = module_of({"a.qkv_proj.weight": torch.zeros(16, 8), "b": torch.zeros(2)})
    with pytest.raises(LoadError, match="part k, v missing"):
        load(model, ring({"a.q_proj.weight": rows(8, 1), "b": torch.ones(2)}), mapper=MAPPER)
    assert partial_load(model) == "the stream did not fit, 1 missing: a.qkv_proj.weight"
    load(model, ring({"b": torch.ones(2)}), strict=False)
    assert partial_load(model) is not None
    load(model, ring({"a.qkv_proj.weight": rows(16, 1), "b": torch.ones(2)}))
    assert partial_load(model) is None


def test_missing_parts_leave_no_raw_memory(ring):
    parts = {"a.q_proj.weight": rows(8, 1), "a.v_proj.weight": rows(4, 3)}
    with skeleton():
        model = nn.Module()
        model.a = nn.Module()
        model.a.qkv_proj = nn.Linear(8, 16, bias=False)
    with pytest.raises(LoadError, match=r"part q, v present, part k missing; would be filled by a.k_proj.weight"):
        load(model, ring(parts), mapper=MAPPER)
    assert model.a.qkv_proj.weight.is_meta
    real = module_of({"a.qkv_proj.weight": torch.full((16, 8), 5.0)})
    load(real, ring(parts), mapper=MAPPER, strict=False, dtype="bfloat16")
    assert torch.equal(real.a.qkv_proj.weight[:8], rows(8, 1).bfloat16())
    assert (real.a.qkv_proj.weight[8:12] == 5).all()


def tied():
    model = nn.Module()
    model.embed, model.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize(
    "names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"], ["head.weight", "embed.weight"]]
)
def test_ties_are_written_once_and_compared(ring, names):
    model = tied()
    report = load(model, ring(dict.fromkeys(names, rows(6, 1, 4))))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, rows(6, 1, 4))
    assert report.tied == {"head.weight": "embed.weight"}
    assert len(report.notes) == len(names) - 1


def test_ties_that_differ_are_an_error_unless_they_may_come_apart(ring):
    values = {"embed.weight": rows(6, 1, 4), "head.weight": rows(6, 2, 4)}
    with pytest.raises(
        LoadError, match=r"head.weight and embed.weight are tied in the module but differ.*by up to 1000"
    ):
        load(tied(), ring(values))
    model = tied()
    report = load(model, ring(values), untie=True)
    assert torch.equal(model.embed.weight, values["embed.weight"])
    assert torch.equal(model.head.weight, values["head.weight"])
    assert report.notes == ["head.weight: untied from embed.weight, since the checkpoint stores two values"]
    assert report.tied == {}


def test_parts_of_a_tied_parameter_come_apart_without_losing_those_that_are_equal(ring):
    def build():
        model = module_of({"a.qkv_proj.weight": torch.zeros(16, 8)})
        model.b = nn.Module()
        model.b.qkv_proj = nn.Module()
        model.b.qkv_proj.weight = model.a.qkv_proj.weight
        return model

    parts = {f"a.{p}_proj.weight": rows(n, at) for at, (p, n) in enumerate({"q": 8, "k": 4, "v": 4}.items())}
    copies = {name.replace("a.", "b.", 1): tensor.clone() for name, tensor in parts.items()}
    model = build()
    report = load(model, ring(copies | parts), mapper=MAPPER)
    assert model.a.qkv_proj.weight is model.b.qkv_proj.weight
    assert report.ok
    copies["b.v_proj.weight"] += 1
    model = build()
    load(model, ring(parts | copies), mapper=MAPPER, untie=True)
    assert torch.equal(model.a.qkv_proj.weight, torch.cat([*parts.values()]))
    assert torch.equal(model.b.qkv_proj.weight, torch.cat([*copies.values()]))


def test_wrapper_prefixes_and_names_that_come_twice(ring):
    model = module_of({"a": torch.zeros(2), "b": torch.zeros(2)})
    report = load(model, ring({"module._orig_mod.a": torch.ones(2), "module._orig_mod.b": torch.ones(2)}))
    assert model.b.tolist() == [1, 1]
    assert report.notes == [
        "'module._orig_mod.' taken off every name: it is the prefix of a wrapper, not of the module"
    ]
    with pytest.raises(MappingError, match=r"of 'module.a' and 'b' only one carries the prefix of a wrapper"):
        load(model, ring({"module.a": torch.ones(2), "b": torch.ones(2)}))
    with pytest.raises(LoadError, match="'a' comes twice in the stream"):
        load(model, ring([("a", torch.ones(2)), ("a", torch.ones(2))]))
    with pytest.raises(MappingError, match="'x' and 'y' both map to 'a'"):
        load(model, ring({"x": torch.ones(2), "y": torch.ones(2)}), mapper=lambda name: "a")


def test_an_exception_of_the_stream_passes_on_and_closes_it(ring):
    closed = []

    def stream(error):
        try:
            yield "a", torch.ones(2)
            if error is not None:
                raise error
            yield from [("b", torch.ones(2))] * 2
        finally:
            closed.append(True)

    model = module_of({"a": torch.zeros(2), "b": torch.zeros(2)})
    for error in (ValueError("disk on fire"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            load(model, stream(error))
        assert caught.value is error
        assert any(
            "this Module is only partly loaded: it broke off at tensor 'a'" in note for note in caught.value.__notes__
        )
        assert partial_load(model) is not None
    with pytest.raises(LoadError, match=r"load broke off .*'b' comes twice"):
        load(model, chain(stream(None), []))
    gc.collect()
    assert len(closed) == 3


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([("a", 1)], r"expected \(name, tensor\) pairs, found tuple of str, int"),
        (["ab"], r"expected \(name, tensor\) pairs, found str"),
        ([("a", torch.ones(2, device="meta"))], "'a' of the stream is on the meta device"),
        ([("a", torch.ones(2).to_sparse())], "'a' of the stream is laid out as torch.sparse_coo"),
    ],
)
def test_what_is_no_tensor_by_name_is_told(items, message):
    with pytest.raises(LoadError, match=message):
        load(module_of({"a": torch.zeros(2)}), items)


def test_a_stream_cannot_be_planned():
    with pytest.raises(LoadError, match="can be loaded but not planned"):
        plan(module_of({"a": torch.zeros(2)}), [("a", torch.ones(2))])


def test_progress_counts_what_the_module_takes(ring):
    seen = []
    model = module_of({"a": torch.zeros(2), "b": torch.zeros(4)})
    load(model, ring({"a": torch.ones(2), "b": torch.ones(4)}), progress=seen.append)
    assert [(each.bytes_done, each.bytes_total, each.tensor) for each in seen] == [(8, 24, "a"), (24, 24, "b")]


def test_dtypes_that_torch_cannot_copy_and_views_keep_their_bits(ring):
    counted = torch.arange(12, dtype=torch.uint8)
    tensors = {
        "packed": counted.view(torch.float4_e2m1fn_x2).reshape(3, 4),
        "eight": counted.view(torch.float8_e4m3fn),
        "nan": torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
    }
    model = module_of({name: torch.zeros_like(bytes_of(each)).view(each.dtype) for name, each in tensors.items()})
    load(model, ring(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(bytes_of(model.get_parameter(name)), bytes_of(tensor)), name
    views = {"turned": rows(4, 1).T, "conjugate": torch.tensor([1 + 2j]).conj(), "row": rows(4, 2)[1]}
    model = module_of({name: torch.zeros(each.shape, dtype=each.dtype) for name, each in views.items()})
    load(model, views)
    for name, tensor in views.items():
        assert torch.equal(model.get_parameter(name), tensor), name


def bytes_of(tensor):
    return tensor.detach().view(torch.uint8)


def test_a_tie_comes_apart_whichever_name_comes_first(ring):
    for order in (["a.w", "b.w", "c.w"], ["b.w", "a.w", "c.w"], ["c.w", "b.w", "a.w"]):
        model = module_of({name: torch.zeros(2) for name in ("a.w", "b.w", "c.w")})
        model.b.w = model.c.w = model.a.w
        values = {"a.w": torch.full((2,), 5.0), "b.w": torch.ones(2), "c.w": torch.ones(2)}
        load(model, ring({name: values[name] for name in order}), untie=True)
        for name, value in values.items():
            assert torch.equal(model.get_parameter(name), value), (order, name)


@pytest.mark.parametrize("equal", ["", "q", "k", "v", "qk", "qv", "kv", "qkv"])
@pytest.mark.parametrize("order", ["aq ak av bq bk bv", "bq bk bv aq ak av", "aq bq bk ak bv av", "bv av ak bk aq bq"])
def test_fused_parameters_come_apart_whichever_parts_differ(ring, equal, order):
    model = module_of({"a.qkv_proj.weight": torch.zeros(8, 4), "b.qkv_proj.weight": torch.zeros(8, 4)})
    model.b.qkv_proj.weight = model.a.qkv_proj.weight
    sizes = {"q": 4, "k": 2, "v": 2}
    tensors = {
        f"{name}.{part}_proj.weight": torch.full((sizes[part], 4), 1.0 if name == "a" or part in equal else 2.0)
        for name, part in order.split()
    }
    report = load(model, ring(tensors), mapper=MAPPER, untie=True)
    assert report.ok
    for name in "ab":
        wanted = torch.cat([tensors[f"{name}.{part}_proj.weight"] for part in sizes])
        assert torch.equal(getattr(model, name).qkv_proj.weight, wanted)
    assert (model.a.qkv_proj.weight is model.b.qkv_proj.weight) == (equal == "qkv")
    [note] = report.notes
    first, second = ("a", "b") if order[0] == "a" else ("b", "a")
    same = f"{second}.qkv_proj.weight: stored as well as {first}.qkv_proj.weight, with equal values; they stay tied"
    apart = "b.qkv_proj.weight: untied from a.qkv_proj.weight, since the checkpoint stores two values"
    assert note == (same if equal == "qkv" else apart)


def test_ties_that_differ_are_told_with_both_names(ring):
    tensors = {"head.weight": rows(6, 2, 4), "embed.weight": rows(6, 1, 4)}
    with pytest.raises(LoadError, match=r"embed.weight and head.weight are tied in the module but differ"):
        load(tied(), ring(tensors))


def test_parts_of_a_parameter_whose_first_name_the_rules_do_not_spell(ring, tmp_path):
    tensors = {
        f"attn.{part}_proj.weight": torch.full((size, 4), float(size))
        for part, size in zip("qkv", (4, 3, 1), strict=True)
    }
    for source in (ring(tensors), write_safetensors(tmp_path / "m.safetensors", tensors)):
        model = module_of({"shared": torch.zeros(8, 4), "attn.qkv_proj.weight": torch.zeros(8, 4)})
        model.attn.qkv_proj.weight = model.shared
        load(model, source, mapper=MAPPER)
        assert model.shared[:, 0].tolist() == [4, 4, 4, 4, 3, 3, 3, 1]
        del tensors["attn.v_proj.weight"]
        with pytest.raises(LoadError, match=r"part v missing; would be filled by attn.v_proj.weight"):
            load(model, tensors, mapper=MAPPER)
        tensors["attn.v_proj.weight"] = torch.ones(1, 4)


def test_what_is_written_and_then_does_not_fit_is_marked(ring):
    model = module_of({"a.qkv_proj.weight": torch.full((8, 4), 7.0)})
    parts = {
        "a.q_proj.weight": torch.ones(4, 4),
        "a.k_proj.weight": torch.ones(3, 4),
        "a.v_proj.weight": torch.ones(2, 4),
    }
    report = load(model, ring(parts), mapper=MAPPER, strict=False)
    assert report.notes[-1] == "a.qkv_proj.weight: written to before the stream showed that it does not fit"
    assert partial_load(model) == "a.qkv_proj.weight was written to before the stream showed that it does not fit"
    load(model, {"a.qkv_proj.weight": torch.ones(8, 4)})
    assert partial_load(model) is None


def test_a_part_that_may_be_missing_is_not_left_on_meta(ring):
    model = module_of({"a.qkv_proj.weight": torch.zeros(8, 4, device="meta"), "o": torch.zeros(2)})
    tensors = {"a.q_proj.weight": torch.ones(4, 4), "o": torch.ones(2)}
    with pytest.raises(LoadError, match=r"is on the meta device, so it has no value that could be kept"):
        load(model, ring(tensors), mapper=MAPPER, ignore_missing=["*qkv*"])


def test_a_wrapped_name_that_the_mapper_drops(ring, tmp_path):
    tensors = {"module.rot.inv_freq": torch.ones(2), "module.a.w": torch.ones(2)}
    for source in (ring(tensors), write_safetensors(tmp_path / "m.safetensors", tensors)):
        model = module_of({"a.w": torch.zeros(2)})
        report = load(model, source, mapper=WeightsMapper(orig_to_new_substr={"inv_freq": None}))
        assert model.a.w.tolist() == [1, 1]
        assert list(report.dropped) == ["module.rot.inv_freq"]


def test_transposes_of_composed_and_of_inner_mappers(ring):
    square = torch.tensor([[1.0, 2], [3, 4]])
    first = WeightsMapper(orig_to_new_prefix={"model.": ""})
    model = module_of({"h.0.c_fc.weight": torch.zeros(2, 2)})
    load(
        model, ring({"model.h.0.c_fc.weight": square}), mapper=first.then(WeightsMapper(transposed=["h.*.c_fc.weight"]))
    )
    assert torch.equal(model.get_parameter("h.0.c_fc.weight"), square.T)
    twice = WeightsMapper(transposed=["model.*"]).then(first).then(WeightsMapper(transposed=["h.*"]))
    load(model, ring({"model.h.0.c_fc.weight": square}), mapper=twice)
    assert torch.equal(model.get_parameter("h.0.c_fc.weight"), square)
    model = module_of({"inner.fc.weight": torch.zeros(2, 2)})
    model.inner.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"c_fc.": "fc."})
    outer = WeightsMapper(orig_to_new_prefix={"model.": "inner."}, transposed=["*.c_fc.weight"])
    load(model, ring({"model.c_fc.weight": square}), mapper=outer)
    assert torch.equal(model.inner.fc.weight, square.T)


def test_a_mapper_that_fails_is_told_with_the_name():
    with pytest.raises(MappingError, match="the mapper fails on 'a': ZeroDivisionError"):
        load(module_of({"a": torch.zeros(2)}), {"a": torch.ones(2)}, mapper=lambda name: 1 / 0)
