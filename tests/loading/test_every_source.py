"""Checkpoints put together at random: every backend, a list and rings of one and two slots give the same values and books."""

from random import Random

import pytest
import torch

from streamload import LoadError, WeightsMapper, guard, load, stream
from streamload.testing import RingSource, module_of, write_safetensors

MAPPER = WeightsMapper(
    orig_to_new_stacked={
        **{part: ("qkv", part) for part in "qkv"},
        "gate": ("gate_up", 0),
        "up": ("gate_up", 1),
        "e.*.a": ("e.ab", 0),
        "e.*.b": ("e.ab", 1),
        "e.*.c": ("e.c", None),
        "first_two": ("three", (0, 1)),
        "third": ("three", 2),
        "both": ("twice", [0, 1]),
    },
    split={"spread": ["one", "two"]},
    transposed=["*.turned"],
)


def layer(rng):
    """What is stored, and what the module has to hold afterwards."""
    width, experts = rng.choice([1, 3, 4]), rng.randint(1, 4)
    stored, wanted = {}, {}

    def some(*shape):
        return torch.randint(0, 200, shape).float()

    def parts(target, **sizes):
        made = {name: some(size, width) for name, size in sizes.items()}
        stored.update(made)
        wanted[target] = torch.cat([*made.values()])

    kinds = rng.sample(["qkv", "gate_up", "experts", "three", "twice", "spread", "turned", "scalar", "plain"], 5)
    if "qkv" in kinds:
        parts("qkv", q=rng.randint(1, 4), k=rng.randint(1, 3), v=rng.randint(1, 3))
    if "gate_up" in kinds:
        parts("gate_up", gate=2, up=2)
    if "three" in kinds:
        parts("three", first_two=rng.randint(2, 4), third=rng.randint(1, 3))
    if "experts" in kinds:
        own = [(some(2, width), some(2, width), some(3, width)) for _ in range(experts)]
        stored.update({f"e.{n}.{kind}": t for n, each in enumerate(own) for kind, t in zip("abc", each, strict=True)})
        wanted["e.ab"] = torch.stack([torch.cat([a, b]) for a, b, _ in own])
        wanted["e.c"] = torch.stack([c for _, _, c in own])
    if "twice" in kinds:
        stored["both"] = some(2, width)
        wanted["twice"] = torch.cat([stored["both"]] * 2)
    if "spread" in kinds:
        stored["spread"] = some(5, width)
        wanted["one"], wanted["two"] = stored["spread"][:2], stored["spread"][2:]
    if "turned" in kinds:
        stored["turned"] = some(3, 5)
        wanted["turned"] = stored["turned"].T
    if "scalar" in kinds:
        stored["scalar"], wanted["scalar"] = torch.tensor([7.0]), torch.tensor(7.0)
    if "plain" in kinds:
        stored["plain"] = wanted["plain"] = some(4, width)
    return stored, wanted


def sources(path, stored):
    write_safetensors(path, stored)
    for backend in ("auto", "mmap", "safetensors", "safetensors-mmap", "runai", "fastsafetensors"):
        yield str(path), {"backend": backend}
        yield stream(path, backend=backend), {}
    yield str(path), {"backend": "mmap", "share": True}
    yield list(stored.items()), {}
    yield stored, {}
    yield RingSource(stored), {}
    yield guard(RingSource(stored, slots=2), poison=True), {}


@pytest.mark.parametrize("seed", range(24))
def test_the_same_from_every_source(tmp_path, seed):
    rng = Random(seed)
    torch.manual_seed(seed)
    dtype, own = rng.choice([(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
    stored, wanted = {}, {}
    for number in range(rng.randint(1, 3)):
        for table, found in zip((stored, wanted), layer(rng), strict=True):
            table.update({f"layers.{number}.{name}": tensor for name, tensor in found.items()})
    order = sorted(stored)
    rng.shuffle(order)
    wrapper = rng.choice(["", "", "module."])
    lost = set(rng.sample(order, rng.choice([0, 0, 1, 2])))
    stored = {f"{wrapper}{name}": stored[name].to(dtype) for name in order if name not in lost}
    books = []
    for source, options in sources(tmp_path / "m.safetensors", stored):
        device = rng.choice(["cpu", "meta"])
        model = module_of(
            {name: torch.full_like(tensor, -1, dtype=own, device=device) for name, tensor in wanted.items()}
        )
        report = load(model, source, mapper=MAPPER, strict=False, **options)
        for name, tensor in wanted.items():
            if name not in report.missing_keys:
                assert torch.equal(model.get_parameter(name), tensor.to(dtype).to(own)), name
            elif device == "meta":
                assert model.get_parameter(name).is_meta, name
        casts = sorted((cast.name, cast.source, cast.target) for cast in report.casts)
        lists = [sorted(each) for each in (report.missing_keys, report.unexpected_keys, report.dropped)]
        books.append([lists, casts, sorted(each.name for each in report.incomplete), report.mismatched_keys])
        if lost:
            assert report.missing_keys
            with pytest.raises(LoadError, match="does not fit"):
                load(model, stored, mapper=MAPPER)
        else:
            assert report.ok
    assert all(each == books[0] for each in books)
