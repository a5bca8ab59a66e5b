"""``merge_lora``: every change by its value, how paths find names, what is refused, and that lent tensors are left alone."""

import json
import math
import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamload import CheckpointError, LoadError, MappingError, Source, SourceError, guard, load, stream
from streamload.sources.adapter import CHUNK
from streamload.sources.lora import merge_lora
from streamload.testing import RingSource, module_of, write_safetensors

PEFT = "base_model.model."
Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
OUT, IN, RANK = 6, 4, 2


def some(*shape, dtype=torch.float32):
    """Numbers that differ, small enough to be exact in every dtype after a product."""
    return (torch.arange(1, math.prod(shape) + 1).reshape(shape) % 7 - 3).to(dtype)


def saved(folder, tensors, binary=False, **config):
    """Write an adapter as PEFT would."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def pair(path, out=OUT, inputs=IN, rank=RANK, dtype=torch.float32, name="", prefix=PEFT):
    """``lora_A`` and ``lora_B`` of one linear module."""
    a, b = some(rank, inputs, dtype=dtype), some(out, rank, dtype=dtype) + 1
    return {f"{prefix}{path}.lora_A{name}.weight": a, f"{prefix}{path}.lora_B{name}.weight": b}


def delta(tensors, path, prefix=PEFT, name=""):
    a, b = (tensors[f"{prefix}{path}.lora_{part}{name}.weight"].float() for part in "AB")
    return b @ a


def taken(items):
    return {name: tensor.clone() for name, tensor in items}


def base(dtype=torch.float32, **more):
    return {
        "model.embed_tokens.weight": torch.full((5, IN), 0.5, dtype=dtype),
        f"{Q}.weight": torch.full((OUT, IN), 10.0, dtype=dtype),
        f"{K}.weight": torch.full((OUT, IN), 20.0, dtype=dtype),
        f"{Q}.bias": torch.full((OUT,), 1.0, dtype=dtype),
        "model.norm.weight": torch.full((IN,), 2.0, dtype=dtype),
        **more,
    }


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("name", ["", ".default", ".my-own"])
def test_pairs_are_added_and_all_else_is_the_very_same_tensor(tmp_path, binary, name):
    tensors = pair(Q, name=name) | {key: each * 2 for key, each in pair(K, name=name).items()}
    stored = base()
    merged = merge_lora(stored, saved(tmp_path / "a", tensors, binary))
    found = dict(merged)
    same(
        found,
        stored
        | {f"{path}.weight": stored[f"{path}.weight"] + 2.0 * delta(tensors, path, name=name) for path in (Q, K)},
    )
    assert [name for name in stored if found[name] is not stored[name]] == [f"{Q}.weight", f"{K}.weight"]
    assert (stored[f"{Q}.weight"] == 10).all()
    suffix = "adapter_model.bin" if binary else "adapter_model.safetensors"
    assert merged.notes == [f"{tmp_path / 'a' / suffix}: merged into 2 tensors, and 0 replaced"]


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 8}, 4.0),
        ({"lora_alpha": -2}, -1.0),
        ({"lora_alpha": 3, "use_rslora": True}, 3 / math.sqrt(2)),
        ({"alpha_pattern": {"q_proj": 10}}, 5.0),
        ({"alpha_pattern": {"k_proj": 10, "j_proj": 12}}, 2.0),
        ({"alpha_pattern": {"proj": 10}}, 2.0),  # not a whole component
        ({"alpha_pattern": {r".*\.self_attn\.q_proj": 10}}, 5.0),
        ({"alpha_pattern": {r"^model\.layers\.\d+\.self_attn\..*": 6, "q_proj": 10}}, 3.0),  # the first that fits
        ({"alpha_pattern": {"^q_proj": 10}}, 2.0),
        ({"rank_pattern": {"q_proj": 2}, "r": 64}, 2.0),
        ({"rank_pattern": {"q_proj": 2}, "r": 64, "use_rslora": True}, 4 / math.sqrt(2)),
    ],
)
def test_scaling(tmp_path, config, scale):
    tensors = pair(Q)
    found = taken(merge_lora(base(), saved(tmp_path / "a", tensors, **config)))
    torch.testing.assert_close(found[f"{Q}.weight"], 10 + scale * delta(tensors, Q), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_sum_is_rounded_once_into_the_dtype_of_the_base(tmp_path, dtype, own):
    tensors = pair(Q, dtype=own)
    tensors[f"{PEFT}{Q}.lora_A.weight"] /= 3  # not exact in any of them
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = (some(OUT, IN) / 7).to(dtype)
    a, b = (tensors[f"{PEFT}{Q}.lora_{part}.weight"].to(wide) for part in "AB")
    [(_, found)] = merge_lora({f"{Q}.weight": weight}, saved(tmp_path / "a", tensors))
    assert found.dtype == dtype
    precise = weight.double() + 2 * (b.double() @ a.double())
    assert (found.double() - precise.to(dtype).double()).abs().max() <= precise.abs().max() * torch.finfo(dtype).eps
    if dtype.itemsize == 2:
        assert torch.equal(found, torch.addmm(weight.float(), b, a, alpha=2).to(dtype))
    if dtype == torch.float64:
        torch.testing.assert_close(found, precise, rtol=1e-14, atol=1e-14)


def test_fan_in_fan_out(tmp_path):
    tensors = pair("h.0.attn.c_attn", out=9, inputs=3)
    weight = torch.full((3, 9), 4.0)
    adapter = saved(tmp_path / "a", tensors, fan_in_fan_out=True)
    [(_, found)] = merge_lora({"h.0.attn.c_attn.weight": weight}, adapter)
    assert torch.equal(found, weight + 2 * delta(tensors, "h.0.attn.c_attn").T)
    square = pair("h.0.attn.c_proj", out=3, inputs=3)
    adapter = saved(tmp_path / "b", square, fan_in_fan_out=True)
    [(_, found)] = merge_lora({"h.0.attn.c_proj.weight": torch.zeros(3, 3)}, adapter)
    assert torch.equal(found, 2 * delta(square, "h.0.attn.c_proj").T)
    assert not torch.equal(found, found.T)


@pytest.mark.parametrize("name", ["", ".default"])
def test_embedding(tmp_path, name):
    path = "model.embed_tokens"
    a, b = some(RANK, 5), some(IN, RANK) + 1
    tensors = {f"{PEFT}{path}.lora_embedding_A{name}": a, f"{PEFT}{path}.lora_embedding_B{name}": b}
    found = taken(merge_lora(base(), saved(tmp_path / "a", tensors)))
    assert torch.equal(found[f"{path}.weight"], 0.5 + 2 * (b @ a).T)
    # PEFT also saves the embedding itself when it has a pair: it takes the place of the base first.
    tensors[f"{PEFT}{path}.base_layer.weight"] = torch.full((5, IN), 7.0)
    merged = merge_lora(base(torch.bfloat16), saved(tmp_path / "b", tensors))
    found = taken(merged)
    assert torch.equal(found[f"{path}.weight"], (7 + 2 * (b @ a).T).bfloat16())
    assert merged.notes[-1].endswith("merged into 1 tensors, and 0 replaced")


@pytest.mark.parametrize("kernel", [(3,), (1,), (3, 2), (1, 1), (2, 1, 3)])
def test_convolutions(tmp_path, kernel):
    a, b = some(RANK, 4, *kernel), some(5, RANK, *[1] * len(kernel)) + 1
    tensors = {f"{PEFT}conv.lora_A.weight": a, f"{PEFT}conv.lora_B.weight": b}
    weight = torch.full((5, 4, *kernel), 3.0)
    adapter = saved(tmp_path / "a", tensors, fan_in_fan_out=True)  # means nothing to a convolution
    [(_, found)] = merge_lora({"conv.weight": weight}, adapter)
    assert torch.equal(found, weight + 2 * torch.einsum("or,ri...->oi...", b.flatten(1), a))


def dora(weight, update, magnitude, dim):
    whole = weight.float() + update
    dims = [n for n in range(whole.ndim) if n != dim]
    shape = [-1 if n == dim else 1 for n in range(whole.ndim)]
    return magnitude.view(shape) * whole / whole.square().sum(dims, keepdim=True).sqrt()


@pytest.mark.parametrize("kind", ["linear", "turned", "embedding", "conv"])
@pytest.mark.parametrize("chunk", [3, 8, CHUNK])
@pytest.mark.parametrize("key", ["lora_magnitude_vector", "lora_magnitude_vector.default.weight"])
def test_dora(tmp_path, kind, chunk, key, monkeypatch):
    monkeypatch.setattr("streamload.sources.adapter.CHUNK", chunk)
    magnitude = torch.arange(1.0, OUT + 1)
    a, b = some(RANK, IN), some(OUT, RANK) + 1
    update, names = 2 * b @ a, ("lora_A.weight", "lora_B.weight")
    if kind == "embedding":
        names = ("lora_embedding_A", "lora_embedding_B")
    if kind in ("embedding", "turned"):
        update = update.T
    if kind == "conv":
        a, b = some(RANK, IN, 3), some(OUT, RANK, 1) + 1
        update, magnitude = 2 * torch.einsum("or,rik->oik", b[..., 0], a), magnitude.view(1, -1, 1)
    weight = some(*update.shape) + 0.5
    tensors = {f"{PEFT}m.{name}": each for name, each in zip(names, (a, b), strict=True)} | {
        f"{PEFT}m.{key}": magnitude
    }
    adapter = saved(tmp_path / "a", tensors, use_dora=True, fan_in_fan_out=kind == "turned")
    [(_, found)] = merge_lora({"m.weight": weight}, adapter)
    dim = 1 if kind in ("embedding", "turned") else 0
    torch.testing.assert_close(found, dora(weight, update, magnitude, dim))
    norms = found.square().sum([n for n in range(found.ndim) if n != dim]).sqrt()
    torch.testing.assert_close(norms, magnitude.flatten())


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    "key", ["score.modules_to_save.default.weight", "score.modules_to_save.weight", "score.weight"]
)
def test_modules_to_save_and_biases_replace(tmp_path, binary, key):
    head, scalar = some(3, IN), torch.tensor(5.0)
    tensors = pair(Q) | {
        f"{PEFT}{key}": head,
        f"{PEFT}{Q}.base_layer.bias": torch.full((OUT,), 8.0),  # bias="lora_only"
        f"{PEFT}model.norm.bias": torch.full((IN,), 9.0),  # bias="all"
        f"{PEFT}model.scale": scalar,
        f"{PEFT}model.positions": torch.tensor([3, 2, 1]),
    }
    more = {
        "score.weight": torch.zeros(3, IN, dtype=torch.bfloat16),
        "model.norm.bias": torch.zeros(IN),
        "model.scale": torch.tensor(1.0),
        "model.positions": torch.tensor([0, 0, 0]),
    }
    merged = merge_lora(base(**more), saved(tmp_path / "a", tensors, binary, bias="all"))
    same(
        taken(merged),
        base(**more)
        | {
            f"{Q}.weight": 10 + 2 * delta(tensors, Q),
            "score.weight": head.bfloat16(),
            f"{Q}.bias": torch.full((OUT,), 8.0),
            "model.norm.bias": torch.full((IN,), 9.0),
            "model.scale": scalar,
            "model.positions": torch.tensor([3, 2, 1]),
        },
    )
    assert merged.notes[-1].endswith("merged into 1 tensors, and 5 replaced")


def test_a_module_to_save_that_has_modules_of_its_own(tmp_path):
    tensors = {f"{PEFT}head.modules_to_save.default.dense.weight": some(3, IN), f"{PEFT}head.out.weight": some(2, 3)}
    stored = {"head.dense.weight": torch.zeros(3, IN), "head.out.weight": torch.zeros(2, 3)}
    same(taken(merge_lora(stored, saved(tmp_path / "a", tensors))), dict(zip(stored, tensors.values(), strict=True)))


# ---- how paths find names

as_stream = pytest.mark.parametrize("known", [False, True], ids=["unknown names", "known names"])


def given(stored, known):
    return stored if known else iter(stored.items())


@as_stream
@pytest.mark.parametrize(
    ("path", "stored"),
    [
        ("model.layers.0.q", "model.layers.0.q.weight"),
        ("model.layers.0.q", "layers.0.q.weight"),
        ("layers.0.q", "model.layers.0.q.weight"),
        ("layers.0.q", "vision.model.layers.0.q.weight"),
        ("base_model.model.layers.0.q", "layers.0.q.weight"),
        ("layers.0.q", "base_model.model.layers.0.q.base_layer.weight"),
        ("layers.0.q", "base_model.model.base_model.model.layers.0.q.weight"),
        ("layers.0.q", "layers.0.q.base_layer.weight"),
        ("q", "model.q.weight"),
        ("", "weight"),
    ],
)
def test_prefixes_and_base_layers(tmp_path, known, path, stored):
    tensors = pair(path) if path else {f"{PEFT}lora_A.weight": some(RANK, IN), f"{PEFT}lora_B.weight": some(OUT, RANK)}
    a, b = tensors.values()
    other = {"model.10.q.weight": torch.zeros(1), "model.layers.0.xq.weight": torch.zeros(1), "q": torch.zeros(1)}
    if path == "q":
        del other["model.10.q.weight"]
    items = other | {stored: torch.full((OUT, IN), 3.0)}
    for strip in (False, True):
        found = dict(merge_lora(given(items, known), saved(tmp_path / "a", tensors), strip_base_layer=strip))
        assert torch.equal(found.pop(stored.replace("base_layer.", "") if strip else stored), 3 + 2 * b @ a)
        assert all(found[name] is other[name] for name in other)


def test_base_layer_is_stripped_from_every_name_or_from_none(tmp_path):
    stored = {f"{Q}.base_layer.weight": torch.zeros(OUT, IN), f"{Q}.base_layer.bias": torch.zeros(OUT)}
    adapter = saved(tmp_path / "a", pair(Q))
    assert [name for name, _ in merge_lora(stored, adapter)] == list(stored)
    stripped = merge_lora(stored, adapter, strip_base_layer=True)
    assert list(stripped.names) == [f"{Q}.weight", f"{Q}.bias"]
    assert [name for name, _ in stripped] == [f"{Q}.weight", f"{Q}.bias"]


def shuffled(stored):
    for seed in range(6):
        names = list(stored)
        random.Random(seed).shuffle(names)
        yield {name: stored[name] for name in names}


def test_the_exact_name_wins_and_so_does_the_longest_path(tmp_path):
    tensors = pair("encoder.q") | {key: each * 2 for key, each in pair("q").items()}
    adapter = saved(tmp_path / "a", tensors)
    names = ["q.weight", "encoder.q.weight"]
    exact = {name: torch.zeros(OUT, IN) for name in [*names, "decoder.q.weight", "x.encoder.q.weight"]}
    for stored in shuffled(exact):
        found = taken(merge_lora(stored, adapter))
        assert torch.equal(found["q.weight"], 2 * delta(tensors, "q"))
        assert torch.equal(found["encoder.q.weight"], 2 * delta(tensors, "encoder.q"))
        assert not found["decoder.q.weight"].any() and not found["x.encoder.q.weight"].any()
    longer = {f"model.{name}": torch.zeros(OUT, IN) for name in names}
    for stored in shuffled(longer):
        for known in (False, True):
            found = taken(merge_lora(given(stored, known), adapter))
            assert torch.equal(found["model.q.weight"], 2 * delta(tensors, "q"))
            assert torch.equal(found["model.encoder.q.weight"], 2 * delta(tensors, "encoder.q"))


@as_stream
def test_a_path_that_fits_two_names_is_an_error_in_every_order(tmp_path, known):
    adapter = saved(tmp_path / "a", pair("layers.0.q"))
    stored = {f"{tower}.layers.0.q.weight": torch.zeros(OUT, IN) for tower in ("text", "vision")}
    for items in shuffled(stored):
        with pytest.raises(MappingError) as caught:
            taken(merge_lora(given(items, known), adapter))
        assert all(repr(name) in str(caught.value) for name in [*stored, "layers.0.q.weight"])
        assert "adapter_model.safetensors" in str(caught.value)


@as_stream
def test_a_name_that_fits_two_paths_is_an_error(tmp_path, known):
    adapter = saved(tmp_path / "a", pair("text.q") | pair("vision.q"))
    with pytest.raises(
        MappingError, match=r"'q.weight' in the stream fits several: 'text.q.weight', 'vision.q.weight'"
    ):
        taken(merge_lora(given({"q.weight": torch.zeros(OUT, IN)}, known), adapter))


def test_an_exact_name_that_comes_after_a_suffix_was_merged_is_an_error(tmp_path):
    stored = {"x.q.weight": torch.zeros(OUT, IN), "q.weight": torch.zeros(OUT, IN)}
    adapter = saved(tmp_path / "a", pair("q"))
    with pytest.raises(
        MappingError, match=r"'x.q.weight' and 'q.weight'; rename one .* only where the source has .names"
    ):
        taken(merge_lora(iter(stored.items()), adapter))
    assert not taken(merge_lora(stored, adapter))["x.q.weight"].any()
    assert not taken(merge_lora(reversed(stored.items()), adapter))["x.q.weight"].any()


# ---- what does not fit


@as_stream
def test_nothing_attached(tmp_path, known):
    adapter = saved(tmp_path / "a", pair(Q) | pair(K), base_model_name_or_path="org/llama")
    stored = {"transformer.h.0.attn.q_proj.weight": torch.zeros(OUT, IN), "wte": torch.zeros(1)}
    source = Counted(stored, known)
    with pytest.raises(LoadError) as caught:
        taken(merge_lora(source, adapter))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'a' / 'adapter_model.safetensors'}: none of 2 tensors to change came: ")
    assert f"'{Q}.weight', '{K}.weight'; the stream has 'transformer.h.0.attn.q_proj.weight', 'wte'; " in message
    assert f"closest to '{Q}.weight': 'transformer.h.0.attn.q_proj.weight'" in message
    assert message.endswith("; the adapter was trained on 'org/llama'")
    assert (source.steps, source.closed) == (0 if known else 3, 1)


@as_stream
def test_partly_attached(tmp_path, known):
    source = Counted(base(), known)
    tensors = pair(Q) | pair(V) | {f"{PEFT}score.weight": torch.ones(2, IN)}
    merged = merge_lora(source, saved(tmp_path / "a", tensors))
    with pytest.raises(
        LoadError, match=rf"2 of 3 tensors to change did not come: '{V}.weight', 'score.weight'; the stream"
    ):
        taken(merged)
    assert (source.steps, source.closed, merged.notes) == (0 if known else 6, 1, [])
    with pytest.raises(SourceError, match="closed"):
        next(merged)


def test_a_new_head_that_the_base_lacks_is_told_as_such(tmp_path):
    adapter = saved(tmp_path / "a", pair(Q) | {f"{PEFT}score.weight": torch.ones(2, IN)})
    with pytest.raises(
        LoadError, match=r"'score.weight'.* has them whole \(modules_to_save\).* add them to the stream"
    ):
        taken(merge_lora(base(), adapter))


@pytest.mark.parametrize("fused", ["qkv_proj.weight", "qkv.weight", "in_proj_weight"])
def test_fused_base_weights_are_named(tmp_path, fused):
    stored = {f"model.layers.0.self_attn.{fused}": torch.zeros(3 * OUT, IN), "model.norm.weight": torch.ones(IN)}
    with pytest.raises(
        LoadError, match=rf"closest to '{Q}.weight': '.*{fused}'.* together with others: take them apart"
    ):
        taken(merge_lora(stored, saved(tmp_path / "a", pair(Q))))


def test_a_fused_weight_that_the_adapter_has_too_is_merged(tmp_path):
    tensors = pair("h.qkv_proj", out=3 * OUT)
    found = taken(merge_lora({"h.qkv_proj.weight": torch.ones(3 * OUT, IN)}, saved(tmp_path / "a", tensors)))
    assert torch.equal(found["h.qkv_proj.weight"], 1 + 2 * delta(tensors, "h.qkv_proj"))


@pytest.mark.parametrize(
    ("shape", "more"), [([OUT, IN + 1], ""), ([IN, OUT], ""), ([OUT], ""), ([8, OUT, IN], "; several weights in one")]
)
def test_another_shape(tmp_path, shape, more):
    adapter = saved(tmp_path / "a", pair(Q), base_model_name_or_path="org/llama")
    source = Counted({f"{Q}.weight": torch.zeros(shape)}, known=True)
    with pytest.raises(LoadError) as caught:
        taken(merge_lora(source, adapter))
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path / 'a' / 'adapter_model.safetensors'}: '{PEFT}{Q}.lora_A.weight' and '{PEFT}{Q}.lora_B.weight': expected a "
        f"base tensor of [{OUT}, {IN}], found '{Q}.weight' of {shape}{more}"
    )
    assert "org/llama" in message and source.closed == 1


def test_another_shape_of_what_is_replaced(tmp_path):
    adapter = saved(tmp_path / "a", {f"{PEFT}model.norm.weight": torch.ones(IN + 1)})
    with pytest.raises(
        LoadError, match=rf"expected a base tensor of \[{IN + 1}\], found 'model.norm.weight' of \[{IN}\]"
    ):
        taken(merge_lora(base(), adapter))


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(OUT, IN, dtype=torch.int8),
        torch.zeros(OUT, IN, dtype=torch.uint8),
        torch.zeros(OUT, IN).to(torch.float8_e4m3fn),
        torch.zeros(OUT, IN, dtype=torch.complex64),
    ],
    ids=lambda each: str(each.dtype),
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_quantised_base(tmp_path, weight, whole):
    tensors = {f"{PEFT}{Q}.weight": torch.ones(OUT, IN)} if whole else pair(Q)
    with pytest.raises(LoadError, match=rf"cannot be merged into '{Q}.weight', which is (I8|U8|F8_E4M3|C64), expected"):
        taken(merge_lora({f"{Q}.weight": weight}, saved(tmp_path / "a", tensors)))


@pytest.mark.parametrize("name", ["x.lora_A.weight", "x.lora_B.default.weight", "x.lora_embedding_A.default", "lora_B"])
@as_stream
def test_adapter_tensors_in_the_stream(tmp_path, name, known):
    stored = base(**{name: torch.zeros(2)})
    with pytest.raises(LoadError, match=rf"'{name}' in the stream is itself part of an adapter"):
        taken(merge_lora(given(stored, known), saved(tmp_path / "a", pair(Q))))


A, B = f"{PEFT}{Q}.lora_A.weight", f"{PEFT}{Q}.lora_B.weight"
M = f"{PEFT}{Q}.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "message"),
    [
        ({}, {"peft_type": "IA3"}, LoadError, r"adapter_config.json: peft_type is 'IA3', expected 'LORA'"),
        ({}, {"peft_type": None}, LoadError, "peft_type is None"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, LoadError, "'pissa_niter_4' changed the base weights"),
        ({}, {"init_lora_weights": "olora"}, LoadError, "path_initial_model_for_weight_conversion"),
        ({}, {"target_parameters": ["experts.down_proj"]}, LoadError, "target_parameters is set"),
        ({}, {"use_qalora": True}, LoadError, "use_qalora is set"),
        ({}, {"alora_invocation_tokens": [1]}, LoadError, "alora_invocation_tokens is set"),
        ({}, {"layer_replication": [[0, 2]]}, LoadError, "layer_replication is set"),
        ({f"{PEFT}x.lora_B.bias": torch.ones(3)}, {}, LoadError, "x.lora_B.bias' is of a kind that cannot be merged"),
        ({f"{PEFT}x.lora_diag": torch.ones(3)}, {}, LoadError, "x.lora_diag' is of a kind that cannot be merged"),
        ({f"{PEFT}e.token_adapter.trainable_tokens_delta": torch.ones(3)}, {}, LoadError, "trainable_tokens_delta' is of"),
        ({B: None}, {}, CheckpointError, rf"'{Q}.weight' has no lora_B, with use_dora=False"),
        ({A: None}, {}, CheckpointError, rf"'{Q}.weight' has no lora_A"),
        ({}, {"use_dora": True}, CheckpointError, "has no lora_magnitude_vector, with use_dora=True"),
        ({M: torch.ones(OUT)}, {}, CheckpointError, "also has a lora_magnitude_vector, with use_dora=False"),
        ({M: torch.ones(3)}, {"use_dora": True}, LoadError, rf"vector' of \[{OUT}\].*found \[3\] as F32"),
        ({}, {"r": 3}, LoadError, rf"expected '{A}' of \[3, {IN}\], .* rank of 3 .*; found \[2, {IN}\] as F32"),
        ({}, {"rank_pattern": {"q_proj": 1}}, LoadError, rf"expected '{A}' of \[1, {IN}\]"),
        ({B: torch.ones(OUT, 3)}, {}, LoadError, rf"expected '{B}' of \[{OUT}, 2\].*found \[{OUT}, 3\]"),
        ({A: torch.ones(2)}, {}, LoadError, rf"expected '{A}' of \[2, 'inputs'\].*found \[2\]"),
        ({B: torch.tensor(1.0)}, {}, LoadError, rf"expected '{B}' of \['outputs', 2\].*found \[\]"),
        ({A: torch.ones(2, IN, dtype=torch.int8)}, {}, LoadError, rf"'{A}' .*as F16, BF16, F32, F64; found .* as I8"),
        ({f"{PEFT}{Q}.base_layer.weight": torch.ones(3)}, {}, LoadError, rf"weight' of \[{OUT}, {IN}\].*found \[3\]"),
        ({f"{PEFT}{Q}.lora_A.second.weight": torch.ones(1)}, {}, CheckpointError, "are of two adapters"),
        ({f"{PEFT}x.lora_A.first.weight": torch.ones(1), f"{PEFT}y.lora_A.second.weight": torch.ones(1)}, {},
         CheckpointError, "are of two adapters"),
        ({}, {"r": 0}, CheckpointError, "r or rank_pattern in adapter_config.json cannot be used: 0 for"),
        ({}, {"r": "2"}, CheckpointError, "r or rank_pattern"),
        ({}, {"lora_alpha": None}, CheckpointError, "lora_alpha or alpha_pattern"),
        ({}, {"alpha_pattern": {"q_(proj": 1}}, CheckpointError, "lora_alpha or alpha_pattern .* unterminated"),
        ({A: None, B: None}, {}, CheckpointError, "holds no tensors"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_merged_are_refused_before_the_first_tensor(tmp_path, tensors, config, kind, message):
    whole = {key: each for key, each in (pair(Q) | tensors).items() if each is not None}
    source = Counted(base(), known=False)
    with pytest.raises(kind, match=message) as caught:
        merge_lora(source, saved(tmp_path / "a", whole, **config))
    assert str(tmp_path / "a") in str(caught.value)
    assert (source.steps, source.closed) == (0, 1)


def test_no_adapter_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere/adapter_config.json: cannot be read: .*No such file"):
        merge_lora(base(), tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="expected an object, found list"):
        merge_lora(base(), tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        merge_lora(base(), tmp_path)
    with pytest.raises(LoadError, match=r"source: expected a stream .* found 'folder'; streamload.stream opens it"):
        merge_lora("folder", tmp_path)


def test_an_adapter_that_is_cut_while_it_is_used(tmp_path):
    adapter = saved(tmp_path / "a", pair(Q))
    merged = merge_lora({f"{Q}.weight": torch.zeros(OUT, IN)}, adapter)
    with open(adapter / "adapter_model.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(SourceError, match=r"adapter_model.safetensors: has been replaced or changed"):
        next(merged)
    assert merged.closed


# ---- lending, order, closing


class Counted:
    """A stream that counts how often it is asked and closed."""

    def __init__(self, tensors, known=True, fail_at=None):
        self.items_, self.fail_at, self.steps, self.closed = iter(tensors.items()), fail_at, 0, 0
        if known:
            self.names = list(tensors)

    def __iter__(self):
        return self

    def __next__(self):
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the disk is gone")
        return next(self.items_)

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_ring_of_one_slot_between_two_guards_in_any_order(tmp_path, dtype):
    tensors = pair(Q) | pair(K) | {f"{PEFT}model.norm.weight": torch.full((IN,), 6.0)}
    adapter = saved(tmp_path / "a", tensors)
    changed = {f"{path}.weight": (base()[f"{path}.weight"] + 2 * delta(tensors, path)).to(dtype) for path in (Q, K)}
    wanted = base(dtype) | changed | {"model.norm.weight": torch.full((IN,), 6.0, dtype=dtype)}
    for stored in shuffled(base(dtype)):
        ring = RingSource(stored, slots=1)
        merged = merge_lora(guard(ring, poison=True), adapter)
        same(taken(guard(merged, poison=True)), wanted)
        assert (ring.steps, ring.closed, merged.closed, merged.exhausted) == (len(stored) + 1, True, True, True)
        same(stored, base(dtype))


def test_a_merged_tensor_is_kept_safely_but_a_lent_one_is_not(tmp_path):
    ring = RingSource(base(), slots=1)
    tensors = pair(Q)
    kept = dict(merge_lora(ring, saved(tmp_path / "a", tensors)))
    assert torch.equal(kept[f"{Q}.weight"], 10 + 2 * delta(tensors, Q))
    assert kept[f"{K}.weight"].isnan().all()


def test_one_step_of_the_source_for_each_tensor(tmp_path):
    source = Counted(base(), known=False)
    merged = merge_lora(source, saved(tmp_path / "a", pair(Q)))
    assert (source.steps, merged.look_ahead_bytes, merged.names) == (0, 0, None)
    for step in range(1, 6):
        next(merged)
        assert (source.steps, source.closed) == (step, 0)
    assert list(merged) == [] and list(merged) == []
    assert (source.steps, source.closed) == (6, 1)


def test_names_lending_and_look_ahead_are_forwarded(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", base())
    adapter = saved(tmp_path / "a", pair(Q))
    with stream(tmp_path) as inner:
        merged = merge_lora(inner, adapter)
        assert isinstance(merged, Source)
        assert (list(merged.names), merged.lends, merged.look_ahead_bytes) == (
            list(base()), False, inner.look_ahead_bytes)  # fmt: skip
        assert inner.look_ahead_bytes > 0
        assert torch.equal(taken(merged)[f"{Q}.weight"], 10 + 2 * delta(pair(Q), Q))
        assert merged.bytes_read == inner.bytes_read > 0
        assert inner.closed
    assert merge_lora(stream(tmp_path, backend="runai"), adapter).lends
    assert not merge_lora(base(), adapter).lends
    assert merge_lora(iter(base().items()), adapter).lends  # it might


@pytest.mark.parametrize("known", [False, True])
def test_left_early_nothing_is_said(tmp_path, known):
    source = Counted(base(), known)
    merged = merge_lora(source, saved(tmp_path / "a", pair(Q)))
    with merged:
        next(merged)
    merged.close()
    assert (source.steps, source.closed, merged.notes) == (1, 1, [])
    with pytest.raises(SourceError, match="closed"):
        next(merged)


def test_left_early_before_all_of_the_adapter_came(tmp_path):
    source = Counted(base(), known=False)
    merged = merge_lora(source, saved(tmp_path / "a", pair(V)))
    next(merged)
    merged.close()
    assert (source.steps, source.closed) == (1, 1)


@pytest.mark.parametrize("fail_at", [1, 3, 6])
def test_an_exception_of_the_source_closes_it_and_passes(tmp_path, fail_at):
    source = Counted(base(), fail_at=fail_at)
    merged = merge_lora(source, saved(tmp_path / "a", pair(Q)))
    with pytest.raises(RuntimeError, match="the disk is gone"):
        taken(merged)
    assert (source.steps, source.closed, merged.closed, merged.exhausted) == (fail_at, 1, True, False)


def test_a_generator_is_closed(tmp_path):
    closed = []

    def generator():
        try:
            yield from base().items()
        finally:
            closed.append(True)

    merged = merge_lora(generator(), saved(tmp_path / "a", pair(Q)))
    next(merged)
    merged.close()
    assert closed == [True]


def test_a_parameter_that_wants_a_gradient_gives_a_plain_tensor(tmp_path):
    model = module_of({f"{Q}.weight": torch.zeros(OUT, IN)})
    model.requires_grad_()
    [(_, found)] = merge_lora(dict(model.named_parameters()), saved(tmp_path / "a", pair(Q)))
    assert not found.requires_grad
    assert torch.equal(found, 2 * delta(pair(Q), Q))


def test_a_base_that_is_not_contiguous(tmp_path):
    weight = some(IN, OUT).T
    [(_, found)] = merge_lora({f"{Q}.weight": weight}, saved(tmp_path / "a", pair(Q)))
    assert torch.equal(found, weight + 2 * delta(pair(Q), Q))


class Sizes(TorchDispatchMode):
    """The bytes of every storage that an operation returns, by address."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                at, nbytes = each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()
                self.seen[at] = max(nbytes, self.seen.get(at, 0))
        return result


@pytest.mark.parametrize("kind", ["pair", "dora", "turned dora", "new"])
def test_beside_the_result_there_are_only_pieces(tmp_path, kind):
    out, inputs = 3001, 1024
    config = {"use_dora": "dora" in kind, "fan_in_fan_out": "turned" in kind}
    tensors = pair("m", out=out, inputs=inputs, dtype=torch.bfloat16)
    shape = (inputs, out) if "turned" in kind else (out, inputs)
    if "dora" in kind:
        tensors[f"{PEFT}m.lora_magnitude_vector"] = torch.ones(out)
    if kind == "new":
        tensors = {f"{PEFT}m.weight": torch.full(shape, 3.0)}
    weight = torch.full(shape, 2.0, dtype=torch.bfloat16)
    merged = merge_lora({"m.weight": weight}, saved(tmp_path / "a", tensors, **config))
    with Sizes() as sizes:
        [(_, found)] = merged
    del sizes.seen[found.untyped_storage().data_ptr()]
    sizes.seen.pop(weight.untyped_storage().data_ptr(), None)
    assert 0.9 * 4 * CHUNK < max(sizes.seen.values()) <= 4 * CHUNK
    if kind == "new":
        wanted = torch.full(shape, 3.0)
    else:
        update = 2 * delta(tensors, "m")
        wanted = weight.float() + (update.T if "turned" in kind else update)
        if "dora" in kind:
            wanted = wanted / wanted.norm(dim=0 if "turned" in kind else 1, keepdim=True)
    torch.testing.assert_close(found, wanted.bfloat16(), rtol=0.01, atol=1e-6)


# ---- with the rest


@pytest.mark.parametrize("lent", [False, True])
def test_loading_end_to_end(tmp_path, lent):
    stored = base(torch.bfloat16)
    write_safetensors(tmp_path / "model.safetensors", stored)
    tensors = pair(Q) | {f"{PEFT}model.norm.weight": torch.full((IN,), 6.0)}
    adapter = saved(tmp_path / "a", tensors)
    model = module_of({name.removeprefix("model."): torch.zeros(each.shape) for name, each in stored.items()})
    source = guard(RingSource(stored, slots=1), poison=True) if lent else stream(tmp_path)
    report = load(model, merge_lora(source, adapter), mapper=lambda name: name.removeprefix("model."))
    assert report.ok and report.clones == 0
    found = {f"model.{name}": each.detach() for name, each in model.named_parameters()}
    wanted = {name: each.float() for name, each in stored.items()}
    wanted[f"{Q}.weight"] = (10 + 2 * delta(tensors, Q)).bfloat16().float()
    wanted["model.norm.weight"] = torch.full((IN,), 6.0)
    same(found, wanted)


def test_a_load_that_lacks_a_part_of_the_adapter_fails(tmp_path):
    model = module_of(base())
    with pytest.raises(LoadError, match=rf"'{V}.weight'"):
        load(model, merge_lora(iter(base().items()), saved(tmp_path / "a", pair(Q) | pair(V))))


# ---- the library itself


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(8, 8), "up_proj": nn.Linear(8, 12)}) for _ in range(2)
        )
        self.conv1, self.conv2 = nn.Conv1d(3, 5, 3), nn.Conv2d(3, 5, (3, 2))
        self.point = nn.Conv2d(4, 6, 1)
        self.head = nn.Linear(12, 3)


CONFIGS = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 7},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.up_proj": 5, "^conv1": 3},
        "alpha_pattern": {r"^layers\.0\..*": 3, "up_proj": 9, "embed": 1},
    },
    "dora": {"use_dora": True},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "head": {"modules_to_save": ["head"]},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_peft_agrees(tmp_path, config, dtype):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Net().to(dtype)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    modules = ["q_proj", "up_proj", "embed", "conv1", "conv2", "point"]
    if config.get("init_lora_weights"):
        modules = modules[:2]
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": modules} | config))
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.normal_()
    wrapped.save_pretrained(tmp_path / "a", safe_serialization=True)
    merged = merge_lora(before, tmp_path / "a")
    found = taken(merged)
    after = wrapped.merge_and_unload().state_dict()
    assert found.keys() == after.keys()
    for name, tensor in after.items():
        assert found[name].dtype == tensor.dtype == dtype
        exact = dtype == torch.float32
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=1e-4 if exact else 0.03,
            atol=1e-5 if exact else 0.1,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    changed = {name for name in before if not torch.equal(before[name], found[name])}
    assert len(changed) >= 2 * len(modules) - 4
    assert ("head.weight" in changed) == ("modules_to_save" in config)
    assert ("head.bias" in changed) == ("modules_to_save" in config or config.get("bias") == "all")


@pytest.mark.parametrize("config", [{}, {"use_dora": True}], ids=["plain", "dora"])
def test_peft_agrees_on_inputs_by_outputs(tmp_path, config):
    peft = pytest.importorskip("peft")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.ModuleDict({"c_attn": Conv1D(12, 4), "c_proj": Conv1D(4, 4)})
    before = {name: each.clone() for name, each in model.state_dict().items()}
    made = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **config)
    wrapped = peft.get_peft_model(model, made)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            nn.init.normal_(parameter)
    wrapped.save_pretrained(tmp_path / "a")
    found = taken(merge_lora(before, tmp_path / "a"))
    torch.testing.assert_close(found, dict(wrapped.merge_and_unload().state_dict()), rtol=1e-4, atol=1e-5)
    assert not torch.equal(found["c_proj.weight"], before["c_proj.weight"])
