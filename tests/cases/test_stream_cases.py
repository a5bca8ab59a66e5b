"""Cases 2, 3, 4, 6, 7, 8, 14 and 17 from the field: one-pass streams, lent buffers, prefixes. (1, 9 and 29: see tests/pooling and
tests/loading/test_hooks.py.)
"""

import random
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from streamload import BudgetError, LoadError, SourceError, as_embedding_model, count_clones, guard, load, stream
from streamload.memory.meter import resident, trim
from streamload.testing import RingSource, module_of, write_safetensors
from tests.pooling.models import Causal, PlainCausal, causal, check_causal

MiB = 1 << 20


def test_2_a_weight_that_waits_for_its_scale_is_kept_by_a_clone_only_where_it_is_lent(tmp_path):
    tensors = {
        "a.weight": torch.full((4, 4), 2.0).to(torch.float8_e4m3fn),
        "filler": torch.full((64,), 7.0),
        "a.weight_scale_inv": torch.tensor([[0.5]]),
    }
    path = str(tmp_path / "m.safetensors")
    save_file(tensors, path)  # aligned: runai copies what is not

    def dequantised(source):
        kept = {}
        for name, tensor in source:
            if name != "filler":
                kept[name] = tensor.clone() if source.lends else tensor
            del tensor
        return kept["a.weight"].float() * kept["a.weight_scale_inv"]

    sources = [RingSource(tensors), guard(RingSource(tensors), poison=True)]
    sources += [stream(path, backend=backend) for backend in ("direct", "mmap", "safetensors", "runai")]
    for source in sources:
        lends = source.lends
        with count_clones() as clones:
            assert dequantised(source).eq(1.0).all()
        assert clones.count == (2 if lends else 0)


def test_3_three_children_are_filled_as_the_tensors_come():
    tensors = {name: torch.full((8,), n + 1.0) for n, name in enumerate(["vision.w", "llm.w0", "llm.w1", "sound.w"])}
    ring = RingSource(tensors, slots=2)
    model = module_of({name: torch.zeros(8) for name in tensors})
    load(model, ring)
    assert all(model.get_parameter(name).eq(each).all() for name, each in tensors.items())
    assert (ring.steps, ring.clones) == (5, 0)


@pytest.mark.parametrize("wrap", [guard, lambda source: guard(guard(source))])
def test_3_what_wraps_a_source_asks_it_no_earlier_than_it_is_asked(wrap):
    ring = RingSource({f"t{n}": torch.ones(2) for n in range(5)})
    wrapped = wrap(ring)
    assert ring.steps == 0
    for n in range(5):
        next(wrapped)
        assert ring.steps == n + 1


def test_4_of_64_tensors_none_is_cloned_and_none_is_left():
    refs = []

    def lent():
        for name, tensor in RingSource((f"t{n}", torch.full((MiB // 4,), n + 1.0)) for n in range(64)):
            refs.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    model = module_of({f"t{n}": torch.zeros(MiB // 4) for n in range(64)})
    generator = lent()
    trim()
    before = resident().anon
    with count_clones() as clones:
        report = load(model, generator)
    assert (clones.count, report.clones) == (0, 0)
    assert all(ref() is None for ref in refs)
    assert len(refs) == 64
    assert resident().anon - before < 8 * MiB
    assert [model.get_parameter(f"t{n}")[7].item() for n in range(64)] == [n + 1.0 for n in range(64)]


@pytest.mark.parametrize("count", [2, 5])
def test_6_a_dict_of_a_small_ring_is_garbage_and_under_guard_an_error(count):
    tensors = {f"t{n}": torch.full((4,), n + 1.0) for n in range(count)}
    kept = dict(RingSource(tensors, slots=2))
    assert all(each.isnan().all() for each in kept.values())  # poisoned on close, also where the ring was large enough
    if count > 2:
        with pytest.raises(Exception, match="'t0' is still held"):
            dict(guard(RingSource(tensors, slots=2)))


def test_6_a_closed_source_gives_nothing_and_what_it_gave_stays(tmp_path):
    tensors = {f"t{n}": torch.full((4,), n + 1.0) for n in range(5)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    for backend in ("direct", "mmap", "safetensors", "safetensors-mmap"):
        with stream(path, backend=backend) as source:
            name, kept = next(source)
        with pytest.raises(SourceError, match="the source is closed"):
            next(source)
        assert torch.equal(kept, tensors[name])


def test_7_what_is_kept_is_no_view_of_a_whole_buffer():
    tensors = {}
    for n in range(16):
        tensors[f"odd.{n}"] = torch.full((4,), n + 0.5)
        tensors[f"model.layers.{n}.weight"] = torch.full((MiB // 4,), n + 1.0)
    seen = []

    class Keeping(Causal):
        def load_weights(self, weights):
            own = dict(self.named_parameters())
            for name, tensor in weights:
                if name in own:
                    own[name].data.copy_(tensor)
                else:
                    seen.append(tensor.untyped_storage().nbytes() == tensor.nbytes)

    model = as_embedding_model(Keeping)(16, 1, MiB // 4)
    model.model.embed_tokens = nn.Module()
    load(model, RingSource(tensors))
    assert seen == [True] * 16


def test_8_buffers_follow_the_need_and_not_the_limit(tmp_path):
    small, large = str(tmp_path / "s.safetensors"), str(tmp_path / "l.safetensors")
    save_file({f"t{n}": torch.ones(MiB // 4) for n in range(4)}, small)
    save_file({f"t{n}": torch.ones(MiB // 4) for n in range(64)}, large)
    for path, limit, most in ((small, "1GiB", 12), (large, "8MiB", 10)):
        for backend in ("direct", "runai"):
            with stream(path, backend=backend, memory_limit=limit) as warm_up:
                next(warm_up)
            trim()
            before, peak = resident().anon, 0
            for _ in stream(path, backend=backend, memory_limit=limit):
                peak = max(peak, resident().anon - before)
            assert peak < most * MiB, (backend, limit)
    one = write_safetensors(tmp_path / "o.safetensors", {"t": torch.ones(4 * MiB)})
    with pytest.raises(BudgetError, match=r"the largest, 't', has 16,777,216 bytes"):
        stream(one, memory_limit="8MiB")
    model = module_of({"t": torch.zeros(4 * MiB)})
    load(model, one, memory_limit="8MiB")
    assert model.t.eq(1).all()


@pytest.mark.parametrize("kind", [Causal, PlainCausal])
@pytest.mark.parametrize("spelling", ["", "model."])
def test_14_flat_and_prefixed_names_load_equally_in_any_order(kind, spelling):
    tensors = causal(spelling, head=False)
    for seed in range(4):
        names = sorted(tensors, reverse=seed == 1)
        if seed > 1:
            random.Random(seed).shuffle(names)
        model = as_embedding_model(kind)()
        report = load(model, RingSource({name: tensors[name] for name in names}))
        check_causal(model)
        assert report.prefix == ("" if spelling else "model.")


def test_14_a_missing_head_is_fine_for_embedding_and_an_error_otherwise():
    tensors = causal(head=False)
    load(as_embedding_model(PlainCausal)(), tensors)
    with pytest.raises(LoadError, match=r"1 missing: lm_head.weight"):
        load(PlainCausal(), tensors)


def test_17_the_score_keeps_its_level_whichever_comes_first():
    class Scored(PlainCausal):
        def __init__(self):
            super().__init__()
            self.score = nn.Linear(4, 2, bias=False)

    score = {"score.weight": torch.arange(8.0).view(2, 4)}
    for tensors in (
        score | causal("", head=False),
        causal("", head=False) | score,
        score | causal("model.", head=False),
    ):
        model = as_embedding_model(Scored, heads=["lm_head"])()
        load(model, RingSource(tensors))
        check_causal(model)
        assert torch.equal(model.score.weight, score["score.weight"])
