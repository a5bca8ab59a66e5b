"""``count_clones`` and the clones that a RingSource counts."""

import copy
import gc
import threading

import torch

from streamload import count_clones
from streamload.testing import RingSource


def test_every_way_of_cloning_counts_once_and_from_every_thread():
    tensor, parameter = torch.ones(4), torch.nn.Parameter(torch.ones(3))
    untouched = torch.Tensor.clone, torch.clone, "clone" in vars(torch.Tensor)
    with count_clones() as clones:
        tensor.clone()
        torch.clone(tensor)
        copy.deepcopy(tensor)
        copy.deepcopy(parameter)
        tensor.untyped_storage().clone()
        assert (clones.count, clones.nbytes) == (5, 4 * 16 + 12)
        threads = [threading.Thread(target=lambda: [tensor.clone() for _ in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (clones.count, clones.nbytes) == (405, 405 * 16 - 4)
        tensor.to(torch.float64)
        tensor[::2].contiguous()
        assert clones.count == 405
    tensor.clone()
    assert clones.count == 405
    assert (torch.Tensor.clone, torch.clone, "clone" in vars(torch.Tensor)) == untouched


def test_counters_nest():
    tensor = torch.ones(2)
    with count_clones() as outer:
        tensor.clone()
        with count_clones() as inner:
            tensor.clone()
        tensor.clone()
    assert (outer.count, inner.count) == (3, 1)
    assert repr(inner) == "count_clones(count=1, nbytes=8)"


def test_a_ring_counts_what_is_cloned_out_of_it():
    other = torch.ones(5)
    ring = RingSource({f"t{n}": torch.full((3,), float(n)) for n in range(4)})
    for name, tensor in ring:
        other.clone()
        if name != "t2":
            tensor[1:].clone()
    assert (ring.steps, ring.clones, ring.clone_bytes) == (5, 3, 3 * 8)
    assert "clone" not in vars(torch.Tensor)
    left = RingSource({"t": torch.ones(1)})
    next(left)
    assert "clone" in vars(torch.Tensor)
    del left
    gc.collect()
    assert "clone" not in vars(torch.Tensor)
