"""``guard``: a consumer that keeps what was only lent is found out, and one that copies is not."""

import threading

import pytest
import torch
from torch import nn

from streamload import BorrowError, guard, load
from streamload.testing import RingSource, module_of

TENSORS = {f"layers.{n}": torch.full((4, 2), float(n)) for n in range(5)}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[1:],
        lambda tensor: tensor.T,
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.data,
        lambda tensor: tensor.view(torch.uint8),
        lambda tensor: nn.Parameter(tensor, requires_grad=False),
        lambda tensor: {"deep": [tensor]},
    ],
)
def test_whatever_is_kept_is_found_out_at_the_first(slots, keep):
    kept, source = [], RingSource(TENSORS, slots)
    with pytest.raises(BorrowError, match=r"'layers.0' is still held after two further tensors"):
        for _, tensor in guard(source):
            kept.append(keep(tensor))
    assert len(kept) == 2
    assert source.closed


@pytest.mark.parametrize("poison", [False, True])
def test_a_consumer_that_copies_passes(poison):
    source = RingSource(TENSORS)
    found = {name: tensor.clone() for name, tensor in guard(source, poison)}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor), name
    model = module_of({name: torch.zeros(4, 2) for name in TENSORS})
    report = load(model, guard(RingSource(TENSORS), poison))
    assert report.clones == 0
    for name, tensor in TENSORS.items():
        assert torch.equal(model.get_parameter(name), tensor), name


def test_a_copy_in_another_thread_that_comes_too_late_is_caught():
    go, found = threading.Event(), []

    def copy_later(tensor):
        go.wait()
        found.append(tensor.clone())

    threads = []
    with pytest.raises(BorrowError, match=r"'layers.0'"):
        for _, tensor in guard(iter(TENSORS.items()), poison=False):
            threads.append(threading.Thread(target=copy_later, args=(tensor,)))
            threads[-1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert len(found) == 2


def test_poison_shows_what_is_read_too_late():
    own = {name: tensor.clone() for name, tensor in TENSORS.items()}
    source = guard(own.items(), poison=True)
    _, first = next(source)
    assert first.tolist() == [[0, 0]] * 4
    _, second = next(source)
    assert first.isnan().all()
    source.close()
    assert second.isnan().all()
    assert list(source) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.ones(3, 4).T[1:],
        torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.ones(4, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.empty(0, 4),
        nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_every_kind_of_tensor_passes_with_its_bits(tensor):
    [(name, lent)] = [*guard([("a", tensor)])]
    assert (name, lent.shape, lent.dtype) == ("a", tensor.shape, tensor.dtype)
    assert (
        lent.resolve_conj().tolist() == tensor.tolist()
        if tensor.dtype.itemsize > 1
        else lent.data_ptr() == tensor.data_ptr()
    )


def test_closing_closes_the_stream():
    closed = []

    def stream():
        try:
            yield from TENSORS.items()
        finally:
            closed.append(True)

    source = guard(stream())
    next(source)
    source.close()
    source.close()
    assert closed == [True]
