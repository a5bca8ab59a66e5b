"""Models of transformers in any size, one for each way in which that library stores and converts weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers as hf


@dataclass(frozen=True)
class Sizes:
    """How large a model is."""

    width: int = 32
    layers: int = 2
    vocabulary: int = 64
    experts: int = 12

    @property
    def text(self) -> dict[str, Any]:
        """What configs of language models take."""
        return {
            **self.encoder,
            "num_key_value_heads": 2,
            "head_dim": self.width // 4,
        }

    @property
    def encoder(self) -> dict[str, Any]:
        """The same without grouped queries."""
        return {
            "vocab_size": self.vocabulary,
            **self._block,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }

    @property
    def vision(self) -> dict[str, Any]:
        """What configs of vision towers take."""
        return {**self._block, "image_size": 28, "patch_size": 14}

    @property
    def _block(self) -> dict[str, Any]:
        return {
            "hidden_size": self.width,
            "intermediate_size": self.width * 3 // 2,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
        }


def architectures(sizes: Sizes) -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Title -> the class and what makes its config."""
    text, encoder, vision = sizes.text, sizes.encoder, sizes.vision
    without_head_dim = {key: value for key, value in text.items() if key != "head_dim"}

    def qwen3_moe() -> Any:
        return hf.Qwen3MoeConfig(
            **text, moe_intermediate_size=sizes.width // 2, num_experts=sizes.experts, num_experts_per_tok=2
        )

    def gemma3() -> Any:
        towers = {"text_config": hf.Gemma3TextConfig(**text), "vision_config": hf.SiglipVisionConfig(**vision)}
        return hf.Gemma3Config(**towers, mm_tokens_per_image=4)

    def gpt2() -> Any:
        own = {"n_embd": sizes.width, "n_layer": sizes.layers, "n_head": 4, "n_positions": 64}
        return hf.GPT2Config(vocab_size=sizes.vocabulary, **own, bos_token_id=1, eos_token_id=2)

    def minicpm() -> Any:
        kinds = ["linear_attention", "full_attention"] * (sizes.layers // 2)
        heads = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), sizes.width // 4)
        heads |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        own = {"image_size": 28, "patch_size": 7, "insert_layer_id": 0}
        towers = {
            "text_config": {**text, **heads, "layer_types": kinds, "model_type": "qwen3_5_text"},
            "vision_config": {**vision, "patch_size": 7, "insert_layer_id": 0, "model_type": "minicpmv4_6_vision"},
        }
        return hf.MiniCPMV4_6Config(**towers, **own)

    return {
        "Llama": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**text)),
        "Qwen3": (hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**text)),
        "Qwen3-MoE": (hf.Qwen3MoeForCausalLM, qwen3_moe),
        "Mixtral": (
            hf.MixtralForCausalLM,
            lambda: hf.MixtralConfig(**text, num_local_experts=sizes.experts - 1, num_experts_per_tok=2),
        ),
        "Gemma3 text": (hf.Gemma3TextModel, lambda: hf.Gemma3TextConfig(**text)),
        "Gemma3 causal": (hf.Gemma3ForCausalLM, lambda: hf.Gemma3TextConfig(**text)),
        "Gemma3 multimodal": (hf.Gemma3ForConditionalGeneration, gemma3),
        "Llava": (
            hf.LlavaForConditionalGeneration,
            lambda: hf.LlavaConfig(text_config=hf.LlamaConfig(**text), vision_config=hf.CLIPVisionConfig(**vision)),
        ),
        "Cohere": (hf.CohereForCausalLM, lambda: hf.CohereConfig(**without_head_dim)),
        "GPT-2": (hf.GPT2LMHeadModel, gpt2),
        "BERT": (hf.BertModel, lambda: hf.BertConfig(**encoder)),
        "ModernBERT": (hf.ModernBertModel, lambda: hf.ModernBertConfig(**encoder, cls_token_id=1, sep_token_id=2)),
        "MiniCPM-V 4.6": (hf.MiniCPMV4_6ForConditionalGeneration, minicpm),
    }
