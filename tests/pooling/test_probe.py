"""The probe of one-pass streams: consults the mapper, stops at the first hit, clones what it probed in vain and no more."""

import itertools
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from streamload import (
    BudgetError,
    LoadError,
    WeightsMapper,
    as_embedding_model,
    count_clones,
    guard,
    load,
    skeleton,
    stream,
)
from streamload.testing import RingSource, write_safetensors, write_sharded
from tests.pooling.models import (
    Causal,
    GemmaLike,
    PlainCausal,
    Recording,
    causal,
    check_causal,
    check_gemma,
    gemma_like,
    module,
    parameter,
)


def gemma(layers=1999):
    return as_embedding_model(GemmaLike)(layers)


@pytest.mark.parametrize("call", ["load", "load_weights"])
def test_2000_tensors_one_step_no_clone_original_names_in_order(call):
    tensors = gemma_like(1999)
    model, ring = gemma(), RingSource(tensors)
    model.watch = lambda: (ring.steps, ring.clones)
    with count_clones() as clones:
        result = load(model, ring) if call == "load" else model.load_weights(ring)
    assert model.at_start == (1, 0)
    assert (clones.count, ring.clones, ring.steps) == (0, 0, 2001)
    assert model.got == list(tensors)
    assert model.calls == 1
    check_gemma(model)
    if call == "load":
        assert (result.ok, result.prefix, result.clones, result.dropped) == (True, "", 0, {})
    else:
        assert result == {name for name, _ in model.named_parameters()}


def test_the_same_through_runai_with_one_buffer(tmp_path):
    tensors = gemma_like(1999)
    path = str(tmp_path / "m.safetensors")
    save_file(tensors, path)  # aligned, as runai would have to copy what is not

    class Unnamed:
        """As another program's streamer is: it lends, and its names are not known."""

        lends = True

        def __init__(self):
            self.inner = stream(path, backend="runai", memory_limit=1)
            self.steps = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.steps += 1
            return next(self.inner)

        def close(self):
            self.inner.close()

    with pytest.raises(BudgetError):
        Unnamed()
    order = []
    with stream(path, backend="runai", memory_limit=16) as names:
        order = [name for name, _ in names]
    assert sorted(order) == sorted(tensors)

    class OneBuffer(Unnamed):
        def __init__(self):
            self.inner = stream(path, backend="runai", memory_limit=16)
            self.steps = 0

    model, source = gemma(), OneBuffer()
    model.watch = lambda: source.steps
    with count_clones() as clones:
        report = load(model, source)
    assert model.at_start == 1
    assert (clones.count, report.clones) == (0, 0)
    assert sorted(model.got) == sorted(tensors)
    assert len(model.got) == 2000
    check_gemma(model)


def test_names_that_the_mapper_drops_are_not_cloned_not_counted_not_forwarded_but_booked():
    dropped = {f"model.audio_tower.{n}": torch.full((4,), 9.0) for n in range(300)}
    tensors = dropped | gemma_like(1699)
    model, ring = gemma(1699), RingSource(tensors)
    model.watch = lambda: (ring.steps, ring.clones)
    report = load(model, ring)
    assert model.at_start == (301, 0)
    assert ring.clones == 0
    assert model.got == list(gemma_like(1699))
    assert list(report.dropped) == list(dropped)
    assert report.dropped["model.audio_tower.7"] == "the module's mapper: prefix rule 'model.audio_tower.' -> None"
    check_gemma(model)


class Extra(GemmaLike):
    """Takes names that only it knows what to do with."""

    def __init__(self, layers):
        super().__init__(layers)
        self.odd = {}
        self.kept = []

    def load_weights(self, weights):
        def known():
            for name, tensor in weights:
                if name.startswith("odd."):
                    self.got.append(name)
                    self.odd[name] = tensor.tolist()
                    self.kept.append(weakref.ref(tensor))
                    assert sum(ref() is not None for ref in self.kept) <= 2  # this one, and the loop's last
                else:
                    yield name, tensor
                del tensor

        return super().load_weights(known())


def test_5_misses_first_are_5_clones_each_let_go_as_it_is_forwarded():
    misses = {f"odd.{n}": torch.full((4,), 50.0 + n) for n in range(5)}
    tensors = misses | gemma_like(1994)
    model, ring = as_embedding_model(Extra)(1994), RingSource(tensors)
    model.watch = lambda: (ring.steps, ring.clones)
    with count_clones() as clones:
        report = load(model, ring)
    assert model.at_start is not None
    assert (clones.count, ring.clones, report.clones, report.clone_bytes) == (5, 5, 5, 5 * 16)
    assert model.got == list(tensors)
    assert model.odd == {f"odd.{n}": [50.0 + n] * 4 for n in range(5)}
    assert all(ref() is None for ref in model.kept)
    check_gemma(model)


def test_from_a_catalog_nothing_is_cloned_and_nothing_read_before_the_decision(tmp_path):
    misses = {f"odd.{n}": torch.full((4,), 50.0 + n) for n in range(5)}
    dropped = {"model.audio_tower.0": torch.full((4,), 9.0)}
    tensors = misses | dropped | gemma_like(30)
    path = str(tmp_path / "m.safetensors")
    save_file(tensors, path)
    for make in (lambda: stream(path), lambda: stream(path, backend="runai"), lambda: stream(path, backend="mmap")):
        model, source = as_embedding_model(Extra)(30), make()
        model.watch = lambda source=source: source.bytes_read
        with count_clones() as clones:
            report = load(model, source)
        assert model.at_start == 0
        assert clones.count == 0
        assert sorted(model.got) == sorted(misses | gemma_like(30))
        assert list(report.dropped) == ["model.audio_tower.0"]
        assert report.bytes_wanted == 36 * 16
        check_gemma(model)
    model = as_embedding_model(Extra)(30)
    report = load(model, path)
    assert (report.clones, report.bytes_read) == (0, 36 * 16)
    check_gemma(model)


@pytest.mark.parametrize("kind", [Causal, PlainCausal])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("order", ["head first", "head last", "head between", "no head"])
def test_heads_never_decide_and_both_spellings_load(tmp_path, kind, prefix, order):
    tensors = causal(prefix, head=order != "no head")
    names = list(tensors)
    if order == "head last":
        names = [*names[1:], names[0]]
    elif order == "head between":
        names = [names[1], names[0], *names[2:]]
    tensors = {name: tensors[name] for name in names}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    body = sum(each.nbytes for name, each in tensors.items() if name != "lm_head.weight")
    sources = {
        "ring": lambda: RingSource(tensors),
        "guarded": lambda: guard(RingSource(tensors, slots=2), poison=True),
        "generator": lambda: (item for item in tensors.items()),
        "list": lambda: list(tensors.items()),
        "dict": lambda: tensors,
        "path": lambda: path,
        "stream": lambda: stream(path),
    }
    for title, source in sources.items():
        if title in ("path", "list"):
            with skeleton():
                model = as_embedding_model(kind)()
        else:
            model = as_embedding_model(kind)()
        report = load(model, source())
        check_causal(model)
        assert report.clones == 0, title
        assert report.prefix == ("" if prefix else "model."), title
        if order != "no head":
            assert report.dropped == {"lm_head.weight": "pooling does without lm_head"}, title
        if title in ("path", "stream"):
            assert body <= report.bytes_read <= body + 2 * 4096, title  # of which the head would be 32,000
        if kind is Causal:
            assert model.got == [f"model.{name.removeprefix('model.')}" for name in names if name != "lm_head.weight"]


@pytest.mark.parametrize("kind", [Causal, PlainCausal])
def test_mixed_spellings_load_name_by_name(kind):
    tensors = causal("model.")
    tensors["layers.1.weight"] = tensors.pop("model.layers.1.weight")
    for order in itertools.permutations(tensors):
        model = as_embedding_model(kind)()
        if kind is Causal and order[[name == "lm_head.weight" for name in order].index(False)] != "layers.1.weight":
            continue  # the class's own loader gets what the first name decides
        load(model, RingSource({name: tensors[name] for name in order}))
        check_causal(model)


class Bare(Recording):
    """The base model itself: no child called ``model``."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(2000, 4)
        self.layers = nn.ModuleList(module(weight=parameter(4)) for _ in range(2))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_prefix_is_stripped_for_a_base_class(tmp_path, prefix):
    tensors = causal(prefix)
    for source in (RingSource(tensors), list(tensors.items()), write_safetensors(tmp_path / "m.safetensors", tensors)):
        model = as_embedding_model(Bare)()
        report = load(model, source)
        assert model.got == [name.removeprefix("model.") for name in tensors if name != "lm_head.weight"]
        assert model.layers[1].weight.eq(2).all()
        assert report.dropped == {"lm_head.weight": "pooling does without lm_head"}
        assert report.clones == 0


class Gpt2Like(Recording):
    """Renames inside its load_weights, so that no mapper tells."""

    def __init__(self, layers=600):
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.h = nn.ModuleList(module(weight=parameter(4)) for _ in range(layers))

    def rename(self, name):
        return name if name.startswith("transformer.") else f"transformer.{name}"


def test_without_a_hit_cloning_stops_and_the_classs_own_renaming_gets_the_stream():
    tensors = {f"h.{n}.weight": torch.full((4,), float(n)) for n in range(600)}
    model, ring = as_embedding_model(Gpt2Like)(), RingSource(tensors)
    report = load(model, ring)
    assert ring.clones == 256
    assert report.clones == 256
    assert model.got == list(tensors)
    assert all(layer.weight.eq(n).all() for n, layer in enumerate(model.transformer.h))
    assert any(note.startswith("probe: none of the first 257 names is at home") for note in report.notes)


def test_without_a_hit_the_budget_bounds_the_clones():
    tensors = {f"h.{n}.weight": torch.full((4,), float(n)) for n in range(600)}
    model, ring = as_embedding_model(Gpt2Like)(), RingSource(tensors)
    report = load(model, ring, memory_limit=100 * 16)
    assert (ring.clones, report.clone_bytes) == (100, 1600)
    assert model.got == list(tensors)
    with pytest.raises(
        BudgetError, match=r"'h.0.weight' has no place in any spelling, and its 16 bytes are more than the 15"
    ):
        load(as_embedding_model(Gpt2Like)(), RingSource(tensors), memory_limit=15)


def test_without_a_hit_the_error_says_what_was_tried():
    tensors = {"modle.embed_tokens.weight": torch.ones(2000, 4), "modle.layers.0.weight": torch.ones(4)}
    with pytest.raises(ValueError, match=r"no parameter modle.embed_tokens.weight") as caught:
        load(as_embedding_model(Causal)(), RingSource(tensors))
    told = "\n".join(caught.value.__notes__)
    assert (
        "modle.embed_tokens.weight: tried modle.embed_tokens.weight -> modle.embed_tokens.weight; "
        "model.modle.embed_tokens.weight -> model.modle.embed_tokens.weight; closest parameter model.embed_tokens.weight"
    ) in told
    with pytest.raises(LoadError, match=r"modle.embed_tokens.weight"):
        load(as_embedding_model(PlainCausal)(), RingSource(tensors))


def test_a_prefix_that_does_not_commute_with_the_mapper():
    class Anchored(Recording):
        hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"enc.": "body."})

        def __init__(self):
            super().__init__()
            self.model = nn.Module()
            self.model.body = module(w=parameter(4))

    with pytest.raises(ValueError, match=r"no parameter body.w"):  # as it would without the adapter
        load(as_embedding_model(Anchored)(), RingSource({"enc.w": torch.ones(4)}))

    class Both(Anchored):
        hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.enc.": "model.body."})

    model = as_embedding_model(Both)()
    load(model, RingSource({"enc.w": torch.ones(4)}))
    assert model.got == ["model.enc.w"]
    assert model.model.body.w.eq(1).all()


def test_a_buffer_or_the_second_name_of_a_tied_pair_decides_as_well():
    class Buffered(Recording):
        def __init__(self):
            super().__init__()
            self.model = nn.Module()
            self.model.register_buffer("scale", torch.zeros(4))
            self.model.w = parameter(4)
            self.model.v = self.model.w

        def load_weights(self, weights):
            for name, tensor in weights:
                self.got.append(name)
                owner = self.model
                getattr(owner, name.removeprefix("model.")).data.copy_(tensor)

    for first in ("scale", "v"):
        tensors = {first: torch.ones(4), "scale": torch.ones(4), "w": torch.ones(4)}
        model, ring = as_embedding_model(Buffered)(), RingSource(tensors)
        report = load(model, ring)
        assert ring.clones == 0
        assert report.prefix == "model."
        assert model.model.scale.eq(1).all()


class Wrapper(Recording):
    """A multimodal model around a language model that loads itself."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.visual.": "visual.", "model.": "language_model.model."}
    )

    def __init__(self):
        super().__init__()
        self.visual = module(weight=parameter(4))
        self.language_model = as_embedding_model(Causal)()

    def load_weights(self, weights):
        def inner():
            for name, tensor in weights:
                self.got.append(name)
                mapped = self.hf_to_vllm_mapper.map_name(name)
                if mapped.startswith("language_model."):
                    yield mapped.removeprefix("language_model."), tensor
                else:
                    self.visual.weight.data.copy_(tensor)

        self.language_model.load_weights(inner())


def test_nested_adapters_probe_once():
    body = causal("model.", head=False)
    odd = {f"model.layers.{n}.weight": body.pop(f"model.layers.{n}.weight") for n in range(2)}
    tensors = {"model.visual.weight": torch.full((4,), 7.0)} | odd | body
    model, ring = as_embedding_model(Wrapper)(), RingSource(tensors)
    report = load(model, ring)
    assert (ring.clones, report.clones) == (0, 0)
    assert model.got == list(tensors)
    assert model.language_model.calls == 1
    check_causal(model.language_model)
    assert model.visual.weight.eq(7).all()
    assert report.ok


def test_an_adapter_inside_a_plain_model_is_fed_once_and_finds_its_own_spelling(tmp_path):
    for kind in (Causal, PlainCausal):
        tensors = {"visual.weight": torch.full((4,), 7.0)}
        tensors |= {f"language_model.{name}": each for name, each in causal("").items()}
        names = sorted(tensors, reverse=True)
        tensors = {name: tensors[name] for name in names}
        path = write_sharded(
            tmp_path / kind.__name__, {f"{n}.safetensors": {x: tensors[x] for x in names[n::2]} for n in (0, 1)}
        )
        for source in (RingSource(tensors), tensors, path):
            model = nn.Module()
            model.visual = module(weight=parameter(4))
            model.language_model = as_embedding_model(kind)()
            report = load(model, source)
            check_causal(model.language_model)
            assert model.visual.weight.eq(7).all()
            assert report.clones == 0  # the body's names come first, and hit
            assert report.dropped["language_model.lm_head.weight"].startswith("pooling does without")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_breaking_off_while_probing_or_after_leaves_a_marked_module_and_no_clones(stop):
    refs = []

    class Watched(Extra):
        def load_weights(self, weights):
            for number, (_, tensor) in enumerate(weights):
                refs.append(weakref.ref(tensor))
                if number == 7:
                    raise stop

    misses = {f"odd.{n}": torch.full((4,), 50.0 + n) for n in range(5)}
    model = as_embedding_model(Watched)(10)
    ring = RingSource(misses | gemma_like(10))
    try:
        load(model, ring)
    except stop as error:
        error.__traceback__ = None
        assert all(ref() is None for ref in refs[:7])
    else:
        raise AssertionError("it went through")
    assert ring.closed
    with pytest.raises(LoadError, match="only partly loaded"):
        model(torch.zeros(1, 1, dtype=torch.long))


class Odd(Causal):
    """Takes names that only it knows what to do with."""

    def load_weights(self, weights):
        return super().load_weights((name, tensor) for name, tensor in weights if not name.startswith("model.odd."))


class OddWrapper(Wrapper):
    def __init__(self):
        super().__init__()
        self.language_model = as_embedding_model(Odd)()


def test_what_the_outer_adapter_has_decided_the_inner_one_does_not_look_for_again():
    odd = {f"model.odd.{n}": torch.full((4,), 50.0) for n in range(7)}
    tensors = {"model.visual.weight": torch.full((4,), 7.0)} | odd | causal("model.", head=False)
    model, ring = as_embedding_model(OddWrapper)(), RingSource(tensors)
    report = load(model, ring)
    assert (ring.clones, report.clones) == (0, 0)
    check_causal(model.language_model)
    plain = nn.Module()
    plain.language_model = as_embedding_model(Odd)()  # on its own it has to look, and clones what it looks at in vain
    ring = RingSource({f"language_model.{name}": each for name, each in (odd | causal("model.", head=False)).items()})
    report = load(plain, ring)
    assert (ring.clones, report.clones) == (7, 7)
    check_causal(plain.language_model)


class Outermost(Recording):
    """Calls the ``load_weights`` of a module inside, which has no parameter for a head that was left out."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    )

    def __init__(self):
        super().__init__()
        self.language_model = Causal()

    def load_weights(self, weights):
        def inner():
            for name, tensor in weights:
                self.got.append(name)
                yield self.hf_to_vllm_mapper.map_name(name).removeprefix("language_model."), tensor

        self.language_model.load_weights(inner())


def test_a_module_inside_that_loads_itself_makes_no_name_at_home():
    tensors = causal("model.")
    model = as_embedding_model(Outermost, heads=["language_model.lm_head"])()
    ring = RingSource(tensors)
    report = load(model, ring)
    assert report.dropped == {"lm_head.weight": "pooling does without language_model.lm_head"}
    assert (ring.clones, report.ok) == (0, True)
    assert model.got == [name for name in tensors if name != "lm_head.weight"]
    check_causal(model.language_model)
