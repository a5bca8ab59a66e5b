"""Which files of a folder are chosen, from their names alone."""

from __future__ import annotations

import random

import pytest

from streamload import CheckpointError
from streamload.checkpoint.locate import choose, natural


def _family(stem, total, ending=".safetensors", *, first=1, width=5):
    return [f"{stem}{n:0{width}}-of-{total:0{width}}{ending}" for n in range(first, first + total)]


def _refused(names, *words):
    with pytest.raises(CheckpointError) as caught:
        choose(names, "folder")
    assert str(caught.value).startswith("folder: ")
    assert caught.value.path == "folder"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["weights.safetensors"], ["weights.safetensors"]),
        (["weights.pt"], ["weights.pt"]),
        (["weights.pth"], ["weights.pth"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        # Format first: any safetensors before any torch file.
        (["pytorch_model.bin", "x.safetensors"], ["x.safetensors"]),
        (["consolidated.safetensors", "pytorch_model.bin"], ["consolidated.safetensors"]),
        # The whole before its parts, the usual name before others.
        (["model.safetensors", *_family("model-", 2)], ["model.safetensors"]),
        (["model.safetensors", "other.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin", "model.pt"], ["pytorch_model.bin"]),
        # Families of all sorts of names.
        (_family("model-", 3), _family("model-", 3)),
        (_family("pytorch_model-", 2, ".bin"), _family("pytorch_model-", 2, ".bin")),
        (_family("", 2), _family("", 2)),
        (_family("my.model_", 2), _family("my.model_", 2)),
        (_family("model-", 2, first=0), _family("model-", 2, first=0)),
        (_family("model-", 1), _family("model-", 1)),
        (["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"],) * 2,
        # A complete family and what is not part of it.
        ([*_family("model-", 2), "extra.safetensors"], _family("model-", 2)),
        ([*_family("model-", 2), *_family("part-", 3)[:2]], _family("model-", 2)),
        # Files of no pattern belong together, in natural order.
        (["layer-10.safetensors", "layer-9.safetensors"], ["layer-9.safetensors", "layer-10.safetensors"]),
        # Variants only where there is nothing else.
        (["model.fp16.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["unet.fp16.safetensors", "unet.safetensors"], ["unet.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        ([*_family("model.fp16-", 2), *_family("model-", 2)], _family("model-", 2)),
        ([*_family("model-", 2, ".fp16.safetensors"), *_family("model-", 2)], _family("model-", 2)),
        (_family("model-", 2, ".fp16.safetensors"), _family("model-", 2, ".fp16.safetensors")),
        # The original release beside the converted one.
        (["consolidated.00.pth", "consolidated.01.pth"], ["consolidated.00.pth", "consolidated.01.pth"]),
        (["consolidated.00.pth", "model.safetensors"], ["model.safetensors"]),
        (["consolidated.00.pth", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (_family("consolidated-", 2), _family("consolidated-", 2)),
    ],
)
def test_what_is_chosen(names, files):
    choice = choose(names, "folder")
    assert choice.files == tuple(files)
    assert choice.index is None
    # Nothing that looks like weights is passed over in silence.
    assert choice.ignored.keys() == set(names) - set(files)


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["model.safetensors.index.json", "model.safetensors"], "model.safetensors.index.json"),
        (["a.safetensors.index.json", "a.safetensors", "model.safetensors"], "a.safetensors.index.json"),
        (["pytorch_model.bin.index.json", "x.bin"], "pytorch_model.bin.index.json"),
        (["model.safetensors.index.json", "pytorch_model.bin.index.json"], "model.safetensors.index.json"),
        (["model.safetensors.index.json", "a.safetensors.index.json"], "model.safetensors.index.json"),
        (["model.safetensors.index.json", "model.fp16.safetensors.index.json"], "model.safetensors.index.json"),
        (["model.safetensors.index.json", "consolidated.safetensors.index.json"], "model.safetensors.index.json"),
        (["consolidated.safetensors.index.json"], "consolidated.safetensors.index.json"),
    ],
)
def test_the_index_that_decides(names, index):
    choice = choose(names, "folder")
    assert (choice.index, choice.files) == (index, ())
    assert choice.ignored.keys() == set(names) - {index}


def test_safetensors_files_go_before_an_index_of_bin_files():
    choice = choose(["model.safetensors", "pytorch_model.bin.index.json", *_family("pytorch_model-", 2, ".bin")], "f")
    assert choice.files == ("model.safetensors",)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("adapter_model.safetensors", "an adapter, not the model"),
        ("adapter_model.bin", "an adapter, not the model"),
        ("optimizer.pt", "optimizer state"),
        ("optimizer.bin", "optimizer state"),
        ("optimizer_0.safetensors", "optimizer state"),
        ("scheduler.pt", "training state"),
        ("training_args.bin", "training state"),
        ("rng_state.pth", "training state"),
        ("rng_state_3.pth", "training state"),
        ("scaler.pt", "training state"),
        ("trainer_state.pt", "training state"),
        ("sub/model.safetensors", "in a sub-folder"),
        ("sub/model.safetensors.index.json", "in a sub-folder"),
        (".cache/model.safetensors", "in a sub-folder"),
    ],
)
def test_what_never_counts(name, why):
    assert choose([name, "pytorch_model.bin"], "folder").ignored == {name: why}
    _refused([name], "no weights here that make up a model", f"{name} is {why}")


@pytest.mark.parametrize(
    "name", ["config.json", "notes.safetensors.json", "model.gguf", "README.md", "x.safetensors.tmp"]
)
def test_what_does_not_look_like_weights_is_not_even_mentioned(name):
    assert choose([name, "model.safetensors"], "folder").ignored == {}
    _refused([name], "no weights here", "*.safetensors")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (_family("model-", 3)[:2], ["2 of 3 shards of model-*.safetensors", "missing: 3"]),
        (_family("model-", 3)[1:], ["2 of 3 shards", "missing: 1"]),
        (_family("model-", 3, first=0)[:2], ["2 of 3 shards", "missing: 2"]),
        (_family("model-", 40)[:1], ["1 of 40 shards", "missing: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ..."]),
        (_family("model-", 2, ".fp16.safetensors")[:1], ["1 of 2 shards of model-*.fp16.safetensors", "missing: 2"]),
        # As many files as there should be, but not those.
        (
            ["model-00001-of-00002.safetensors", "model-00003-of-00002.safetensors"],
            ["1 of 2 shards", "missing: 2"],
        ),
        (
            [*_family("model-", 2), "model-00003-of-00002.safetensors"],
            ["3 shards of model-*.safetensors are here", "their names say that there are 2"],
        ),
        (["model-00001-of-00002.safetensors", "model_00002-of-00002.safetensors"], ["1 of 2 shards", "missing: 2"]),
    ],
)
def test_an_incomplete_family(names, words):
    _refused(names, *words)


def test_two_complete_families():
    words = ["two complete sets", "a-00001-of-00002.safetensors (2 files)", "b-00001-of-00003.safetensors (3 files)"]
    _refused([*_family("a-", 2), *_family("b-", 3)], *words)
    # The same model split twice, and names that differ only in how they are written.
    _refused([*_family("model-", 2), *_family("model-", 3)], "two complete sets")
    _refused([*_family("model-", 2), *_family("model_", 2)], "two complete sets")
    _refused([*_family("model-", 2), *_family("model-", 2, width=4)], "two complete sets")


def test_shards_of_similar_families_are_not_mixed():
    choice = choose([*_family("model-", 2), "model_00001-of-00002.safetensors"], "folder")
    assert choice.files == tuple(_family("model-", 2))


def test_several_indexes():
    _refused(
        ["a.safetensors.index.json", "b.safetensors.index.json"], "several indexes", "a.safetensors", "b.safetensors"
    )


def test_the_order_of_the_listing_does_not_matter():
    names = [*_family("model-", 12), "model.fp16.safetensors", "consolidated.safetensors", "optimizer.pt", "x.bin"]
    expected = choose(names, "folder")
    for seed in range(5):
        shuffled = random.Random(seed).sample(names, len(names))
        assert choose(shuffled, "folder") == expected


def test_natural_order():
    names = ["s10", "s9", "s1", "s", "s1b", "s1a2", "s1a10"]
    assert sorted(names, key=natural) == ["s", "s1", "s1a2", "s1a10", "s1b", "s9", "s10"]
    # Digits that are no decimal numbers, such as superscripts, are text.
    assert choose(["x1²2.safetensors", "²1.safetensors"], "folder").files == ("x1²2.safetensors", "²1.safetensors")
