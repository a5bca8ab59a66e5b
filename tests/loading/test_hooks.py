"""Modules' own ``load_weights`` and parameters' own ``weight_loader``: called as they should be, and not believed."""

import threading
import time

import pytest
import torch
from torch import nn

from streamload import BorrowError, LoadError, MappingError, WeightsMapper, load, partial_load, plan, skeleton, stream
from streamload.testing import RingSource, write_safetensors


class Tower(nn.Module):
    """Loads itself: counts calls, tells when it finished, and renames ``old.`` to ``new``."""

    def __init__(self, *names, size=4):
        super().__init__()
        self.calls = self.finished = 0
        self.got = []
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((size,), -1.0)))

    def load_weights(self, weights):
        self.calls += 1
        done = set()
        for name, tensor in weights:
            self.got.append(name)
            target = name.replace("old_", "")
            getattr(self, target).data.copy_(tensor)
            done.add(target)
        self.finished += 1
        return done


class Two(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.language_model = Tower("a", "b", **options)
        self.vision_tower = Tower("x", "y", **options)
        self.scale = nn.Parameter(torch.zeros(2))


def interleaved():
    return {
        "language_model.a": torch.full((4,), 1.0),
        "vision_tower.x": torch.full((4,), 2.0),
        "language_model.old_b": torch.full((4,), 3.0),
        "scale": torch.full((2,), 4.0),
        "vision_tower.y": torch.full((4,), 5.0),
    }


def check(model):
    assert model.language_model.a.tolist() == [1.0] * 4
    assert model.vision_tower.x.tolist() == [2.0] * 4
    assert model.language_model.b.tolist() == [3.0] * 4
    assert model.scale.tolist() == [4.0] * 2
    assert model.vision_tower.y.tolist() == [5.0] * 4
    for tower in (model.language_model, model.vision_tower):
        assert (tower.calls, tower.finished) == (1, 1)


def sources(path):
    write_safetensors(path, interleaved())
    yield interleaved()
    yield list(interleaved().items())
    yield RingSource(interleaved())
    yield stream(path)
    yield stream(path, backend="runai")
    yield str(path)


@pytest.mark.parametrize("build", ["plain", "skeleton"])
def test_interleaved_modules_are_called_and_finished_once(tmp_path, build):
    for source in sources(tmp_path / "m.safetensors"):
        if build == "skeleton":
            with skeleton():
                model = Two()
        else:
            model = Two()
        threads = threading.active_count()
        report = load(model, source)
        check(model)
        assert report.ok
        assert report.clones == 0
        assert (report.missing_keys, report.unexpected_keys) == ([], [])
        assert sorted(model.language_model.got) == ["a", "old_b"]
        assert threading.active_count() == threads
        assert partial_load(model) is None


def test_a_plan_says_what_hooks_take(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", interleaved())
    model = Two()
    made = plan(model, path)
    assert made.ok
    assert "language_model: its own load_weights takes 2 tensors" in made.notes
    assert made.bytes_to_read == 4 * 16 + 8
    assert made.forecast.staging_bytes <= 1 << 20
    assert model.language_model.calls == 0


class Liar(Tower):
    def load_weights(self, weights):
        return {name for name, _ in weights}


def test_a_hook_that_reports_a_name_and_writes_nothing_is_found_out(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"t.a": torch.ones(4), "t.b": torch.ones(4)})
    for source in (str(path), {"t.a": torch.ones(4), "t.b": torch.ones(4)}):
        model = nn.Module()
        model.t = Liar("a", "b")
        with pytest.raises(LoadError, match="2 missing") as caught:
            load(model, source)
        assert "t.a: 0 of 4 elements were written, though t: Liar.load_weights reports it as loaded" in str(
            caught.value
        )
        assert caught.value.report.missing_keys == ["t.a", "t.b"]
        assert partial_load(model) is not None


class Thirds(Tower):
    """Writes one third of a fused parameter and calls it done."""

    def load_weights(self, weights):
        for _, tensor in weights:
            self.qkv.data[2:4].copy_(tensor)
        return {"qkv"}


def test_a_fused_weight_of_which_a_third_was_written_is_not_loaded():
    model = nn.Module()
    model.t = Thirds("qkv", size=6)
    with pytest.raises(LoadError) as caught:
        load(model, {"t.q": torch.ones(2)})
    assert "t.qkv: 2 of 6 elements were written, though t: Thirds.load_weights reports it" in str(caught.value)
    with skeleton():
        model.t = Thirds("qkv", size=6)
    report = load(model, {"t.q": torch.ones(2)}, strict=False)
    assert report.missing_keys == ["t.qkv"]
    assert model.t.qkv.is_meta  # no raw memory


class Yielding(Tower):
    """Yields the names that it has loaded, as some do."""

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)
            yield name


def test_a_load_weights_that_yields_names_is_run():
    for model, prefix in ((Yielding("a", "b"), ""), (nn.Module(), "t.")):
        if prefix:
            model.t = Yielding("a", "b")
        load(model, RingSource({f"{prefix}a": torch.ones(4), f"{prefix}b": torch.full((4,), 2.0)}))
        assert [each[0].item() for each in model.parameters()] == [1.0, 2.0]


class Finishing(Tower):
    """Makes something else of its parameters once it has them, and lets go of those."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.packed = nn.Parameter(torch.cat([self.a.data, self.b.data]))
        del self.a, self.b


def test_a_module_may_make_something_else_of_its_parameters_when_it_has_them():
    model = nn.Module()
    model.t = Finishing("a", "b")
    report = load(model, {"t.a": torch.ones(4), "t.b": torch.full((4,), 2.0)})
    assert model.t.packed.tolist() == [1.0] * 4 + [2.0] * 4
    assert report.ok


class Assigning(Tower):
    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data = tensor.clone()


class Keeping(Tower):
    def load_weights(self, weights):
        for name, tensor in list(weights):
            getattr(self, name).data.copy_(tensor)


def test_a_module_that_puts_other_memory_in_place_is_believed_and_told():
    model = nn.Module()
    model.t = Assigning("a")
    report = load(model, RingSource({"t.a": torch.full((4,), 7.0)}))
    assert model.t.a.tolist() == [7.0] * 4
    assert "t.a: replaced by the module's own load_weights" in report.notes


def test_a_module_that_lists_a_stream_of_lent_tensors_is_told(tmp_path):
    tensors = {f"t.{name}": torch.full((4,), n + 1.0) for n, name in enumerate("abcd")}
    model = nn.Module()
    model.t = Keeping(*"abcd")
    with pytest.raises(BorrowError, match=r"t: Keeping.load_weights still holds 'a' when it asks for the next but one"):
        load(model, RingSource(tensors))
    for source in (tensors, write_safetensors(tmp_path / "m.safetensors", tensors)):
        model.t = Keeping(*"abcd")
        load(model, source)
        assert [getattr(model.t, name)[0].item() for name in "abcd"] == [1.0, 2.0, 3.0, 4.0]


class Early(Tower):
    def load_weights(self, weights):
        name, tensor = next(iter(weights))
        getattr(self, name).data.copy_(tensor)


def test_a_module_that_stops_early_is_told():
    model = nn.Module()
    model.t = Early("a", "b", "c")
    threads = threading.active_count()
    with pytest.raises(LoadError, match=r"t: Early.load_weights returned before its stream had ended"):
        load(model, {"t.a": torch.ones(4), "t.b": torch.ones(4), "t.c": torch.ones(4)})
    assert threading.active_count() == threads


class Failing(Tower):
    def load_weights(self, weights):
        for name, _ in weights:
            raise KeyError(f"no {name} here")


def test_what_a_hook_raises_is_passed_on_and_the_others_end():
    model = Two()
    model.vision_tower = Failing("x", "y")
    threads = threading.active_count()
    with pytest.raises(KeyError, match="no x here") as caught:
        load(model, RingSource(interleaved()))
    assert "this Two is only partly loaded" in caught.value.__notes__[0]
    assert threading.active_count() == threads
    assert model.language_model.finished == 0
    assert partial_load(model) is not None


def test_an_interrupt_ends_all_modules():
    def items():
        yield "language_model.a", torch.ones(4)
        yield "vision_tower.x", torch.ones(4)
        raise KeyboardInterrupt

    threads = threading.active_count()
    model = Two()
    with pytest.raises(KeyboardInterrupt):
        load(model, items())
    assert threading.active_count() == threads
    assert (model.language_model.finished, model.vision_tower.finished) == (0, 0)


class Rooted(Tower):
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.": "", "gone.": None})

    def load_weights(self, weights):
        return super().load_weights((self.hf_to_vllm_mapper.map_name(name), tensor) for name, tensor in weights)


def test_the_models_own_load_weights_gets_the_original_names_and_maps_once(tmp_path):
    tensors = {"model.a": torch.ones(4), "model.old_b": torch.full((4,), 2.0)}
    for source in (tensors, RingSource(tensors), write_safetensors(tmp_path / "m.safetensors", tensors)):
        model = Rooted("a", "b")
        report = load(model, source)
        assert sorted(model.got) == ["a", "old_b"]
        assert model.calls == 1
        assert (model.a[0].item(), model.b[0].item()) == (1.0, 2.0)
        assert report.ok
        assert report.bytes_wanted == 32


class Own(nn.Module):
    """Its load_weights goes through streamload itself."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.inner = Tower("a")

    def load_weights(self, weights):
        return load(self, weights)


def test_a_load_weights_that_calls_load_does_not_run_for_ever():
    for call in (load, lambda model, weights: model.load_weights(weights)):
        model = Own()
        call(model, RingSource({"w": torch.ones(3), "inner.a": torch.full((4,), 2.0)}))
        assert model.w.tolist() == [1.0] * 3
        assert model.inner.a.tolist() == [2.0] * 4
        assert model.inner.calls == 1


class Sliced(nn.Module):
    """As vLLM's layers: parameters with a loader that takes its part of a tensor (tensor parallel rank 1 of 2)."""

    def __init__(self, honest=True):
        super().__init__()
        self.qkv = nn.Parameter(torch.full((6, 2), -1.0))
        self.out = nn.Parameter(torch.full((2, 2), -1.0))
        self.calls = []

        def qkv_loader(param, tensor, shard_id):
            self.calls.append(shard_id)
            at = {"q": 0, "k": 2, "v": 4}[shard_id]
            param.data[at : at + 2].copy_(tensor[2:4])

        def out_loader(param, tensor):
            if honest:
                param.data.copy_(tensor[2:4])

        self.qkv.weight_loader = qkv_loader
        self.out.weight_loader = out_loader


MAPPER = WeightsMapper(orig_to_new_stacked={part: ("qkv", part) for part in "qkv"})


def halves(*parts):
    made = {part: torch.arange(8.0).view(4, 2) + 10 * n for n, part in enumerate("qkv") if part in parts}
    return made | {"out": torch.arange(8.0).view(4, 2) + 100}


@pytest.mark.parametrize("order", ["qkv", "vkq"])
def test_weight_loaders_get_whole_tensors_and_their_part(tmp_path, order):
    tensors = halves(*"qkv")
    tensors = {name: tensors[name] for name in [*order, "out"]}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    for source in (tensors, RingSource(tensors), path, stream(path, backend="fastsafetensors")):
        model = Sliced()
        report = load(model, source, mapper=MAPPER)
        assert sorted(model.calls) == ["k", "q", "v"]
        assert torch.equal(model.qkv, torch.cat([tensors[part][2:4] for part in "qkv"]))
        assert torch.equal(model.out, tensors["out"][2:4])
        assert report.ok
        assert report.clones == 0


def test_a_weight_loader_that_writes_nothing_and_a_part_that_never_comes_are_told():
    with pytest.raises(LoadError) as caught:
        load(Sliced(honest=False), halves(*"qkv"), mapper=MAPPER)
    assert "out: 0 of 4 elements were written" in str(caught.value)
    assert caught.value.report.missing_keys == ["out"]
    with pytest.raises(LoadError) as caught:
        load(Sliced(), halves("q", "v"), mapper=MAPPER)
    assert "qkv: 8 of 12 elements were written" in str(caught.value)
    assert caught.value.report.missing_keys == ["qkv"]


def test_a_part_that_comes_twice_is_told():
    twice = WeightsMapper(orig_to_new_stacked={part: ("qkv", part) for part in "qkv"} | {"r": ("qkv", "q")})
    with pytest.raises(MappingError, match="'q' and 'r' both map to 'qkv' part 'q'"):
        load(Sliced(), halves(*"qkv") | {"r": torch.ones(4, 2)}, mapper=twice)


def test_a_stacked_rule_outside_leaves_names_for_a_module_that_maps_itself():
    model = nn.Module()
    model.t = Sliced()
    seen = []

    def own(weights):
        for name, tensor in weights:
            seen.append(name)
            parameter = model.t.out if name == "out" else model.t.qkv
            parameter.weight_loader(parameter, tensor, *([name] if name != "out" else []))

    Sliced.load_weights = lambda self, weights: own(weights)
    try:
        load(model, {f"t.{name}": tensor for name, tensor in halves(*"qkv").items()}, mapper=MAPPER)
    finally:
        del Sliced.load_weights
    assert seen == ["q", "k", "v", "out"]
    assert model.t.qkv[0].tolist() == [4.0, 5.0]


@pytest.mark.slow
def test_the_cost_of_two_interleaved_towers_is_linear():
    def seconds(count):
        model = nn.Module()
        for tower in "ab":
            model.add_module(tower, Tower(*(f"p{n}" for n in range(count // 2)), size=1))
        items = [(f"{'ab'[n % 2]}.p{n // 2}", torch.tensor([float(n)])) for n in range(count)]
        start = time.process_time()
        load(model, items)
        taken = time.process_time() - start
        assert model.b.p7.item() == 15.0
        assert (model.a.calls, model.b.calls) == (1, 1)
        return taken

    seconds(100)
    # Quadratic cost would be 16 times; the machine may be twice as slow meanwhile.
    assert min(seconds(8000) for _ in range(2)) < 9 * min(seconds(2000) for _ in range(2))


def test_a_mapper_is_not_put_before_a_load_weights_that_maps_itself():
    with pytest.raises(LoadError, match=r"mapper=: Rooted has a load_weights of its own, .* mapped twice"):
        load(Rooted("a", "b"), {"model.a": torch.ones(4)}, mapper=WeightsMapper(orig_to_new_prefix={"x.": "model."}))


class Careless(Tower):
    """Writes into parameters that want gradients, which torch allows only where no gradients are wanted."""

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).copy_(tensor)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_module_that_loads_itself_works_in_the_mode_of_its_caller(mode):
    model = nn.Module()
    model.t = Careless("a")
    with mode():
        load(model, {"t.a": torch.ones(4)})
    assert model.t.a.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        load(model, {"t.a": torch.ones(4)})
