"""Loading onto an accelerator goes through pinned staging, and only through that."""

from __future__ import annotations

import pytest
import torch

from streamload import load, plan, skeleton
from streamload.sources.staging import FIXED_OVERHEAD
from streamload.testing import module_of, tensor_bytes, write_safetensors
from tests.cache import evict, warm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]

LIMIT = 4 * 1024 * 1024
#: The second is larger than all staging together.
TENSORS = {
    "a": torch.arange(1000, dtype=torch.int64),
    "b": torch.arange(4_000_003).to(torch.bfloat16),
    "c": torch.full((), 3.0),
    "d": torch.full((700, 900), 4.0),
}


@pytest.fixture
def path(tmp_path) -> str:
    return write_safetensors(tmp_path / "model.safetensors", TENSORS)


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.mark.parametrize("state", [warm, evict])
def test_parameters_that_are_there_already(path, state):
    state(path)
    module = module_of({name: torch.zeros_like(tensor, device=device()) for name, tensor in TENSORS.items()})
    forecast = plan(module, path, memory_limit=LIMIT).forecast
    assert forecast.params_bytes == 0
    assert FIXED_OVERHEAD < forecast.staging_bytes <= LIMIT
    addresses = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    report = load(module, path, memory_limit=LIMIT)
    found = module.state_dict()
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == addresses
    assert {name: tensor.device.type for name, tensor in found.items()} == dict.fromkeys(TENSORS, device().type)
    assert {name: tensor_bytes(tensor.cpu()) for name, tensor in found.items()} == {
        name: tensor_bytes(tensor) for name, tensor in TENSORS.items()
    }
    assert report.bytes_wanted == sum(map(len, map(tensor_bytes, TENSORS.values())))


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_skeleton_is_filled_on_the_device(path, dtype):
    with skeleton():
        module = module_of({name: torch.empty_like(tensor) for name, tensor in TENSORS.items()})
    load(module, path, device=device(), dtype=dtype, memory_limit=LIMIT)
    for name, tensor in TENSORS.items():
        found = module.state_dict()[name]
        assert found.device.type == device().type
        assert torch.equal(found.cpu(), tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)


def test_it_moves_to_the_host_when_asked(path):
    module = module_of({name: torch.zeros_like(tensor, device=device()) for name, tensor in TENSORS.items()})
    load(module, path, device="cpu")
    assert {name: tensor_bytes(tensor) for name, tensor in module.state_dict().items()} == {
        name: tensor_bytes(tensor) for name, tensor in TENSORS.items()
    }
