"""A model with just the parameters that a checkpoint stores, which loads itself as the models of serving engines do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from streamload.checkpoint import Checkpoint
from streamload.mapping import WeightsMapper
from streamload.sources.dtypes import torch_dtype


class Mirror(nn.Module):
    """Its names are those of ``checkpoint``; of a multimodal one those that engines give to the language model inside."""

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "language_model.model.",
            "model.visual.": "visual.",
            "model.vision_tower.": "vision_tower.",
        }
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        for name, spec in checkpoint.tensors.items():
            mapped = self.hf_to_vllm_mapper.map_name(name)
            assert mapped is not None
            *path, key = mapped.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            shape = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" else spec.shape
            memory = torch.empty(shape, dtype=torch_dtype(spec.dtype))
            owner.register_parameter(key, nn.Parameter(memory, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Map every name once and copy the tensor into its parameter."""
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            mapped = self.hf_to_vllm_mapper.map_name(name)
            if mapped in parameters:
                parameters[mapped].data.copy_(tensor)
                loaded.add(mapped)
        return loaded
