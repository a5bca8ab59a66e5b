"""trace: what the function does to real tensors is what its rectangles say."""

from __future__ import annotations

import time
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import core_model_loading as hf

from streamload.checkpoint import TensorSpec
from streamload.loading.blocks import MOST_BLOCKS, Untraceable
from streamload.loading.placement import pieces
from streamload.loading.tracing import Moved, Traced, trace
from streamload.sources.dtypes import dtype_code, torch_dtype
from streamload.testing import tensor_bytes

GAP = 48


class Store:
    """Tensors as a file would hold them, with gaps between them."""

    def __init__(self) -> None:
        self.data = torch.full((GAP,), 0xEE, dtype=torch.uint8)

    def put(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Views are stored with everything that lies between their elements, as torch.save does."""
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((reach if tensor.numel() else 0,), (1,)).contiguous().view(torch.uint8)
        strides = None if tensor.is_contiguous() else tuple(tensor.stride())
        code, offset = dtype_code(tensor.dtype), len(self.data)
        self.data = torch.cat([self.data, flat, torch.full((GAP + -len(flat) % 16,), 0xEE, dtype=torch.uint8)])
        return TensorSpec(name, code, tuple(tensor.shape), "f", offset, tensor.numel() * tensor.itemsize, strides)

    def assemble(self, moved: Moved) -> torch.Tensor:
        """The result as the loader would read it; every element once."""
        result = torch.zeros(moved.shape, dtype=torch_dtype(moved.dtype_code))
        times = torch.zeros(moved.shape, dtype=torch.int32)
        for view, region in moved.blocks:
            assert view.shape == tuple(stop - start for start, stop in region)
            assert view.nbytes == prod(view.shape) * torch_dtype(view.dtype).itemsize
            where = tuple(slice(start, stop) for start, stop in region)
            times[where] += 1
            for piece in pieces(view, None, 256, 64):
                flat = self.data[piece.offset : piece.offset + piece.span].view(torch_dtype(view.dtype))
                part = flat.as_strided([stop - start for start, stop in piece.region], piece.strides)
                result[where][tuple(slice(*each) for each in piece.region)] = part
        assert bool((times == 1).all())
        return result


def distinct(*shape: int, dtype=torch.float32, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + prod(shape)).to(dtype).reshape(shape)


def check(function, tensors: dict[str, list[torch.Tensor]]) -> dict[str, Moved]:
    """Apply ``function`` for real and traced, and compare."""
    store = Store()
    specs = {key: [store.put(f"{key}.{n}", each) for n, each in enumerate(group)] for key, group in tensors.items()}
    real = function({key: list(group) for key, group in tensors.items()})
    found = trace(function, specs)
    assert found.keys() == real.keys()
    for name, value in real.items():
        value = value[0] if isinstance(value, list) else value
        moved = found[name]
        assert moved.shape == tuple(value.shape)
        assert torch_dtype(moved.dtype_code) == value.dtype
        if all(view.dtype == moved.dtype_code for view, _ in moved.blocks):
            assert sum(view.nbytes for view, _ in moved.blocks) == value.numel() * value.itemsize
        assert tensor_bytes(store.assemble(moved)) == tensor_bytes(value), name
    return found


def one(function, *tensors: torch.Tensor) -> Moved:
    """As check, for a function of tensors."""
    return check(lambda given: {"out": function(*given["in"])}, {"in": list(tensors)})["out"]


def chained(*operations: hf.ConversionOps, sources: list[str], targets: list[str], **more):
    """The conversion that ``WeightConverter.convert`` makes of ``operations``."""

    def function(tensors):
        for operation in operations:
            tensors = operation.convert(tensors, source_patterns=sources, target_patterns=targets, **more)
        return tensors

    return function


def group(*shape: int, count: int = 1, start: int = 1) -> list[torch.Tensor]:
    return [distinct(*shape, start=start + n * prod(shape)) for n in range(count)]


class Config(SimpleNamespace):
    def get_text_config(self):
        return self


class Model(nn.Module):
    """Only what Split, Transpose and others ask of a model."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


CONFIG = Config(
    num_attention_heads=2,
    num_experts=4,
    vocab_size=10,
    unpadded_vocab_size=7,
    vision_config=SimpleNamespace(num_attention_heads=4),
)

#: operations, tensors by source pattern, target patterns, further arguments
CONVERSIONS = {
    "chunk": ([hf.Chunk(0)], {"a": group(6, 5)}, ["x", "y", "z"], {}),
    "chunk dim 1": ([hf.Chunk(1)], {"a": group(6, 4)}, ["x", "y"], {}),
    "chunk by config": ([hf.Chunk(0, "num_experts")], {"a": group(8, 3)}, ["x.*"], {"config": CONFIG}),
    "split": (
        [hf.Split(0)],
        {"a": group(9, 4)},
        ["q", "k"],
        {"full_layer_name": "q", "model": Model(q=(6, 4), k=(3, 4))},
    ),
    "concatenate": ([hf.Concatenate(0)], {"a": group(2, 3), "b": group(4, 3, start=50)}, ["x"], {}),
    "concatenate dim 1": ([hf.Concatenate(1)], {"a": group(2, 3), "b": group(2, 1, start=50)}, ["x"], {}),
    "interleave": ([hf.Interleave(0)], {"a": group(8, 3)}, ["x"], {}),
    "interleave dim 1": ([hf.Interleave(1)], {"a": group(2, 8, 3)}, ["x"], {}),
    "interleave inverse": ([hf.Interleave(1, inverse=True)], {"a": group(2, 8, 3)}, ["x"], {}),
    "merge": ([hf.MergeModulelist(0)], {"a.*": group(3, 2, count=5)}, ["x"], {}),
    "merge dim 1": ([hf.MergeModulelist(1)], {"a.*": group(3, 2, count=5)}, ["x"], {}),
    "split modules": ([hf.SplitModulelist(0)], {"a": group(4, 3, 2)}, ["x.*"], {}),
    "split modules dim 1": ([hf.SplitModulelist(1)], {"a": group(4, 3, 1)}, ["x.*"], {}),
    "transpose": ([hf.Transpose(0, 1)], {"a": group(4, 3)}, ["x"], {}),
    "transpose inner": ([hf.Transpose(1, 2)], {"a": group(2, 4, 3)}, ["x"], {}),
    "transpose checked": (
        [hf.Transpose(0, 1, check_dims=True)],
        {"a": group(4, 3)},
        ["x"],
        {"full_layer_name": "x", "model": Model(x=(3, 4))},
    ),
    "transpose not needed": (
        [hf.Transpose(0, 1, check_dims=True)],
        {"a": group(4, 3)},
        ["x"],
        {"full_layer_name": "x", "model": Model(x=(4, 3))},
    ),
    "conv3d to linear": ([hf.Conv3dToLinear(3, (2, 2, 2))], {"a": group(4, 3, 2, 2, 2)}, ["x"], {}),
    "linear to conv3d": ([hf.LinearToConv3d(3, (2, 2, 2))], {"a": group(4, 24)}, ["x"], {}),
    "rope": ([hf.PermuteForRope()], {"a": group(16, 3)}, ["x"], {"config": CONFIG}),
    "rope inverse": ([hf.PermuteForRope(inverse=True)], {"a": group(16, 3)}, ["x"], {"config": CONFIG}),
    "rope of a bias": ([hf.PermuteForRope()], {"a": group(16)}, ["x"], {"config": CONFIG}),
    "rope of a part": ([hf.PermuteForRope("vision_config")], {"a": group(16, 3)}, ["x"], {"config": CONFIG}),
    "vision fuse": (
        [hf.VisionFuseAndPermuteForRope(0, ["q", "k"])],
        {"q": group(16, 3), "k": group(16, 3, start=100), "v": group(16, 3, start=200)},
        ["qkv"],
        {"config": CONFIG},
    ),
    "vision unfuse": (
        [hf.VisionUnfuseAndPermuteForRope(0, ["q", "k"])],
        {"qkv": group(48, 3)},
        ["q", "k", "v"],
        {"config": CONFIG},
    ),
    "ernie fuse": (
        [hf.ErnieFuseAndSplitTextVisionExperts(0, 1)],
        {"gate.*": group(3, 2, count=4), "up.*": group(3, 2, count=4, start=50)},
        ["text", "vision"],
        {"config": CONFIG},
    ),
    "ernie split": (
        [hf.ErnieSplitAndDecoupleTextVisionExperts(0, 1)],
        {"text": group(4, 6, 2), "vision": group(4, 6, 2, start=50)},
        ["gate.*", "up.*"],
        {"config": CONFIG},
    ),
    "nothing to dequantize": ([hf.Inkling2LoopDequantizeExperts()], {"a": group(4, 3)}, ["x"], {}),
    "merge queries": (
        [hf.Inkling2LoopMergeMessageQueries()],
        {"a": group(6, 4), "b": group(6, 4, start=50)},
        ["x"],
        {},
    ),
    "split queries": ([hf.Inkling2LoopMergeMessageQueries(inverse=True)], {"a": group(3, 4, 5)}, ["x", "y"], {}),
    "unpad": (
        [hf.Inkling2UnpadVocab()],
        {"a": group(10, 3)},
        ["x"],
        {"config": CONFIG, "model": Model(x=(7, 3)), "full_layer_name": "x"},
    ),
    "unpad and narrow": (
        [hf.Inkling2UnpadVocab()],
        {"a": [distinct(10, 30) / 7]},
        ["x"],
        {"config": CONFIG, "model": Model(x=(7, 30)).to(torch.bfloat16), "full_layer_name": "x"},
    ),
    "experts": (
        [hf.MergeModulelist(0), hf.Concatenate(1)],
        {"gate.*": group(3, 2, count=4), "up.*": group(3, 2, count=4, start=50)},
        ["x"],
        {},
    ),
    "interleaved experts": ([hf.Interleave(1), hf.Chunk(1)], {"a": group(2, 8, 3)}, ["x", "y"], {}),
    "merged, interleaved": ([hf.MergeModulelist(0), hf.Interleave(1)], {"a.*": group(8, 3, count=4)}, ["x"], {}),
    "fused with rope": (
        [hf.Chunk(0), hf.PermuteForRope(permute_layer_names=["q", "k"])],
        {"qkv": group(48, 3)},
        ["q", "k", "v"],
        {"config": CONFIG},
    ),
}

#: Rectangles that the result is known to need.
COUNTS = {
    "chunk": {"x": 1, "y": 1, "z": 1},
    "transpose": {"x": 1},
    "conv3d to linear": {"x": 1},
    "linear to conv3d": {"x": 1},
    "interleave": {"x": 2},
    "interleave dim 1": {"x": 2},
    "interleave inverse": {"x": 4},
    "interleaved experts": {"x": 1, "y": 1},
    "merge": {"x": 5},
    "experts": {"x": 8},
    "merged, interleaved": {"x": 8},
    "rope": {"x": 4},
    "rope of a part": {"x": 8},
    "fused with rope": {"q": 4, "k": 4, "v": 1},
    "merge queries": {"x": 3},
    "split queries": {"x": 3, "y": 3},
}


@pytest.mark.parametrize("case", CONVERSIONS)
def test_conversions_of_transformers(case):
    operations, tensors, targets, more = CONVERSIONS[case]
    found = check(chained(*operations, sources=list(tensors), targets=targets, **more), tensors)
    for name, count in COUNTS.get(case, {}).items():
        assert len(found[name].blocks) == count, name


def test_every_operation_of_transformers_is_among_them():
    known = {type(operation) for operations, *_ in CONVERSIONS.values() for operation in operations}
    there = {each for each in vars(hf).values() if isinstance(each, type) and issubclass(each, hf.ConversionOps)}
    assert there - known <= {hf.ConversionOps, hf._IdentityOp}


MOVES = {
    "T": lambda a: a.T,
    "t": lambda a: a.t().contiguous(),
    "mT": lambda a: a.mT.clone(),
    "t of a scalar": lambda a: a[1, 2].t().transpose(0, -1).squeeze(),
    "permute": lambda a: a.view(2, 2, 6).permute(-1, 0, 1),
    "movedim": lambda a: a.view(2, 2, 6).movedim(0, -1),
    "slices": lambda a: a[1:, ::2],
    "negative slice": lambda a: a[-3:-1, -1],
    "steps": lambda a: torch.cat([a, a], 1)[::3, 2::5],
    "select": lambda a: a[2, 3],
    "narrow": lambda a: a.narrow(-1, 2, 3),
    "narrow copy": lambda a: torch.narrow_copy(a, 0, 1, 2),
    "unsqueeze": lambda a: a[None, :, None].unsqueeze(-1),
    "squeeze": lambda a: a[None, :, None].squeeze(),
    "squeeze dim": lambda a: a[None, :, None].squeeze(0),
    "squeeze wide": lambda a: a.squeeze(0),
    "squeeze dims": lambda a: a[None, :, None].squeeze((0, -2)),
    "expand nothing": lambda a: a.expand(1, -1, 6),
    "flatten": lambda a: a.T.flatten(),
    "unflatten": lambda a: a.unflatten(1, (3, -1)),
    "other sizes": lambda a: a.reshape(3, 8),
    "sizes without a common one": lambda a: a.T.reshape(8, 3),
    "index": lambda a: a[:, [0, 3, -1]],
    "index select": lambda a: a.index_select(0, torch.tensor([3, 1, 1])),
    "unbind": lambda a: torch.stack(a.unbind(1)[::2]),
    "tensor_split": lambda a: a.tensor_split(3, 1)[1],
    "split": lambda a: a.split(5, 1)[1],
    "split sizes": lambda a: a.split([1, 2, 3], 1)[2],
    "vstack": lambda a: torch.vstack([a, a[:1]]),
    "hstack": lambda a: torch.hstack([a[:, 3:], a]),
    "cat with nothing": lambda a: torch.cat([a[:0].flatten(), a, a[:0]]),
    "empty": lambda a: a[2:2].reshape(0, 3, 2),
    "empty stack": lambda a: torch.stack([a[:0], a[:0]]).transpose(0, 1),
    "detach": lambda a: a.detach().data,
    "einsum": lambda a: torch.einsum("ij->ji", a),
    "to": lambda a: a.to("cpu").to(a.dtype).cpu(),
    "wider": lambda a: a.double(),
    "wider and back": lambda a: a.double().float(),
    "narrower": lambda a: (a.to(torch.bfloat16)).T.contiguous(),
    "promoted": lambda a: torch.cat([a, a[:1].double()]),
    "views of a cat": lambda a: torch.cat([a, a[1:3]]).view(3, 2, 2, 3).transpose(1, 3).reshape(9, 4),
    "parameter": lambda a: nn.Parameter(a, requires_grad=False),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("case", MOVES)
def test_moves(case, mode):
    with mode():
        one(MOVES[case], distinct(4, 6))


@pytest.mark.parametrize("case", MOVES)
def test_moves_of_stored_views(case):
    one(MOVES[case], distinct(6, 9)[:, 1:9:2].T)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn])
def test_dtypes(dtype):
    moved = one(lambda a, b: torch.stack([a, b]).transpose(0, 2), *(distinct(3, 4).to(dtype) for _ in range(2)))
    assert moved.dtype_code == dtype_code(dtype)


def test_a_scalar_and_a_tensor_as_it_is():
    assert one(lambda a: a, distinct()).blocks[0][1] == ()
    assert one(lambda a, b: torch.stack([a, b]).view(2, 1), distinct(), distinct(start=5)).shape == (2, 1)
    view, region = one(lambda a: a, distinct(2, 3)).blocks[0]
    assert view.strides is None and region == ((0, 2), (0, 3))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_nothing_is_no_block(shape):
    moved = one(lambda a: torch.stack([a, a]).flatten(), torch.empty(shape))
    assert moved == Moved((0,), "F32", [])


def test_neighbours_are_one_block():
    assert len(one(lambda a: torch.cat(a.split(2)), distinct(8, 3)).blocks) == 1
    assert len(one(lambda a: torch.stack(a.unbind(1), 1), distinct(8, 3)).blocks) == 1
    assert len(one(lambda a: torch.stack(a.unbind(0), 1), distinct(8, 3)).blocks) == 1
    assert len(one(lambda a: torch.cat([a[5:], a[:5]]), distinct(8, 3)).blocks) == 2
    assert len(one(lambda a: torch.cat([a, a]), distinct(8, 3)).blocks) == 2
    assert len(one(lambda a: a.view(3, 8).view(8, 3), distinct(8, 3)).blocks) == 1


def test_a_block_is_cut_where_a_view_needs_it_only():
    odd, even = distinct(3, 2), distinct(5, 2, start=10)
    assert len(one(lambda a, b: torch.cat([a, b]).view(4, 2, 2), odd, even).blocks) == 4
    assert len(one(lambda a, b: torch.cat([a, b]).view(2, 4, 2), odd, even).blocks) == 3
    assert len(one(lambda a, b: torch.cat([a, b]).view(8, 2, 1), odd, even).blocks) == 2
    assert len(one(lambda a, b: torch.cat([a, b], 1).view(3, 4, 2), distinct(3, 4), odd[:, :1].expand(3, 4).clone()))


UNTRACEABLE = {
    "add": (lambda a: a + 1, "aten.add"),
    "in place": (lambda a: a.mul_(2), "aten.mul_"),
    "in place view": (lambda a: a.t_(), "aten.t_"),
    "flip": (lambda a: a.flip(0), "aten.flip"),
    "zeros": (lambda a: torch.cat([a, a.new_zeros(1, 6)]), "aten.new_zeros"),
    "computed": (lambda a: torch.cat([a, torch.zeros(1, 6)]), "computed"),
    "copied into": (lambda a: torch.empty(4, 6).copy_(a), "aten.copy_"),
    "assigned": (lambda a: torch.empty(5, 6).__setitem__(0, a[0]), "aten.copy_"),
    "item": (lambda a: a[0, 0].item(), "aten._local_scalar_dense"),
    "branch": (lambda a: a if a.max() > 3 else a.T, "aten.max"),
    "list": (lambda a: a.tolist(), "tolist"),
    "numpy": (lambda a: a.numpy(), "numpy"),
    "bits": (lambda a: a.view(torch.int32), "aten.view.dtype"),
    "to integers": (lambda a: a.int(), "F32 becomes I32"),
    "twice rounded": (lambda a: a.half().float(), "by way of F16"),
    "twice rounded in a cat": (lambda a: torch.cat([a.half(), a]), "by way of F16"),
    "repeated": (lambda a: a[None].expand(3, 4, 6), "aten.expand|repeats"),
    "as index": (lambda a: torch.arange(30)[a.long()], "becomes I64"),
    "mask": (lambda a: a[[True, False, True, False]], "list of integers"),
    "two lists": (lambda a: a[[0, 1], [2, 3]], "several lists"),
    "data": (lambda a: setattr(a, "data", a.T), "data of a tensor is set"),
    "out": (lambda a: torch.cat([a, a], out=torch.empty(8, 6)), "aten.cat.out"),
    "other layout": (lambda a: torch.ops.aten._to_copy(a, layout=torch.sparse_coo), "sparse_coo"),
    "sparse": (lambda a: a.to_sparse(), "sparse"),
    "no tensor": (lambda a: torch.ones(3), "not made of stored elements"),
    "several": (lambda a: [a, a], "not made of stored elements"),
    "wrong shapes": (lambda a: torch.cat([a, a.T]), "cat of shapes"),
    "wrong stack": (lambda a: torch.stack([a, a.T]), "stack of shapes"),
    "wrong view": (lambda a: a.T.view(24), "RuntimeError"),
    "wrong index": (lambda a: a[:, [7]], "IndexError"),
    "error": (lambda a: {}["x"], "KeyError"),
}


@pytest.mark.parametrize("case", UNTRACEABLE)
def test_untraceable(case):
    function, message = UNTRACEABLE[case]
    spec = Store().put("a", distinct(4, 6))
    with pytest.raises(Untraceable, match=message):
        trace(lambda given: {"out": function(given["a"][0])}, {"a": [spec]})


def test_index_by_a_traced_tensor():
    store = Store()
    specs = {"in": [store.put("a", distinct(4, 6)), store.put("b", torch.tensor([1, 0]))]}
    with pytest.raises(Untraceable, match="stored value"):
        trace(lambda given: {"out": given["in"][0][given["in"][1]]}, specs)
    with pytest.raises(Untraceable, match="stored value"):
        trace(lambda given: {"out": torch.ones(4)[given["in"][1]]}, specs)


def test_dequantizing_is_untraceable():
    store = Store()
    tensors = {"weight": distinct(2, 3, 32).to(torch.float8_e4m3fn), "scale": distinct(2, 3, 1)}
    function = chained(hf.Inkling2LoopDequantizeExperts(), sources=["weight", "scale", "amax", "by"], targets=["x"])
    with pytest.raises(Untraceable):
        trace(function, {name: [store.put(name, tensor)] for name, tensor in tensors.items()})
    padded = chained(hf.Inkling2UnpadVocab(inverse=True), sources=["a"], targets=["x"], config=CONFIG)
    with pytest.raises(Untraceable, match="new_zeros"):
        trace(padded, {"a": [store.put("a", distinct(7, 3))]})


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_elements_of_less_than_a_byte(dtype):
    with pytest.raises(Untraceable, match=f"a: elements of {dtype}"):
        trace(lambda given: given, {"a": [TensorSpec("a", dtype, (2, 8), "f", 0, 8)]})


def test_too_many_blocks():
    side = 2 * MOST_BLOCKS
    spec = TensorSpec("a", "F32", (2, side), "f", 0, 8 * side)
    few = trace(lambda given: {"x": given["a"][0].T[: MOST_BLOCKS // 2].reshape(-1)}, {"a": [spec]})
    assert len(few["x"].blocks) == MOST_BLOCKS // 2
    for function in (lambda a: a.T.reshape(-1), lambda a: a[:, list(range(0, side, 2)) * 2]):
        with pytest.raises(Untraceable, match="more than 65,536 blocks"):
            trace(lambda given, function=function: {"x": function(given["a"][0])}, {"a": [spec]})


def test_a_traced_tensor_looks_like_a_tensor():
    def function(given):
        tensor = given["a"][0]
        assert isinstance(tensor, torch.Tensor) and isinstance(tensor, Traced)
        assert tensor.is_contiguous() and not tensor.T.is_contiguous() and tensor.T.contiguous().is_contiguous()
        assert tensor.T.stride() == (1, 6) and tensor[:, ::2].stride() == (6, 2)
        assert repr(tensor.T) == "Traced([6, 4], torch.float32, 1 blocks)"
        return {"x": [tensor]}

    assert trace(function, {"a": [Store().put("a", distinct(4, 6))]})["x"].shape == (4, 6)


def test_experts_of_a_large_model_take_seconds():
    def specs(kind: str, layer: int, shape: tuple[int, int]) -> list[TensorSpec]:
        return [TensorSpec(f"{layer}.{n}.{kind}", "BF16", shape, "f", 0, 2 * prod(shape)) for n in range(128)]

    fuse = chained(hf.MergeModulelist(0), hf.Concatenate(1), sources=["gate", "up"], targets=["x"])
    merge = chained(hf.MergeModulelist(0), sources=["down"], targets=["y"])
    layers = [
        ({kind: specs(kind, layer, (768, 2048)) for kind in ("gate", "up")}, specs("down", layer, (2048, 768)))
        for layer in range(48)
    ]
    started, blocks = time.perf_counter(), 0
    for gate_up, down in layers:
        blocks += len(trace(fuse, gate_up)["x"].blocks) + len(trace(merge, {"down": down})["y"].blocks)
    seconds = time.perf_counter() - started
    assert blocks == 48 * 128 * 3
    assert seconds < 5, seconds


def factored(data, numel: int) -> tuple[int, ...]:
    """Some shape of ``numel`` elements."""
    shape = []
    while numel > 1 and len(shape) < 4:
        size = data.draw(st.sampled_from([d for d in range(1, numel + 1) if numel % d == 0]))
        shape.append(size)
        numel //= size
    return (*shape, numel)


def random_step(data, tensor: torch.Tensor):
    """An operation that fits ``tensor``, as a function."""
    dims = st.integers(0, tensor.ndim - 1)
    dim, other, size = data.draw(dims), data.draw(dims), 0
    size = tensor.shape[dim]
    start, step = data.draw(st.integers(0, size)), data.draw(st.integers(1, 3))
    stop = data.draw(st.integers(start, size))
    shape = factored(data, tensor.numel()) if tensor.numel() else tensor.shape
    cut = (slice(None),) * dim + (slice(start, stop, step),)
    return data.draw(
        st.sampled_from(
            [
                lambda a: a.reshape(shape),
                lambda a: a.reshape(shape),
                lambda a: a.transpose(dim, other),
                lambda a: a.transpose(dim, other).contiguous().view(shape),
                lambda a: a.unsqueeze(dim),
                lambda a: a[cut],
                lambda a: torch.cat([a, a[cut]], dim),
                lambda a: torch.cat(a.split(max(1, stop), dim)[::-1], dim),
                lambda a: torch.cat(a.split([start, size - start], dim)[::-1], dim),
                lambda a: torch.stack([a, a], dim),
                lambda a: torch.cat([each.unsqueeze(other) for each in a.unbind(dim)], dim - 1) if size else a,
                lambda a: a.squeeze(),
                lambda a: a.index_select(dim, torch.arange(start, size, 2)),
                lambda a: a.narrow(dim, start, stop - start).clone(),
            ]
        )
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_compositions(data):
    shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3)
    first = distinct(*data.draw(shapes), dtype=torch.int32)
    second = distinct(*first.shape, dtype=torch.int32, start=1000)
    if data.draw(st.booleans()):
        second = second.T.contiguous().T if second.ndim == 2 else torch.stack([second, second], -1)[..., 0]
    dim = data.draw(st.integers(0, first.ndim - 1))
    steps = [lambda a, b: torch.cat([a, b, a], dim)]
    tensor = steps[0](first, second)
    for _number in range(data.draw(st.integers(1, 6))):
        if tensor.ndim == 0 or tensor.numel() > 3000:
            break
        steps.append(random_step(data, tensor))
        tensor = steps[-1](tensor)

    def function(a, b):
        tensor = steps[0](a, b)
        for step in steps[1:]:
            tensor = step(tensor)
        return tensor

    one(function, first, second)
