"""Lay out a checkpoint as large as the largest open ones, in files that take no room: headers are real, data is a hole.

Names, shapes and dtypes are those of DeepSeek-V3: a mixture of experts whose matrices are stored in F8_E4M3 with an F32
scale for every block of 128 x 128. Shapes follow from its ``config.json``
(https://huggingface.co/deepseek-ai/DeepSeek-V3).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

#: Bytes of one element.
_WIDTH = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
_BLOCK = 128


@dataclass(frozen=True)
class Config:
    """The numbers of ``config.json`` that shapes depend on."""

    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    num_hidden_layers: int = 61
    first_k_dense_replace: int = 3
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int = 129280


class Entry(NamedTuple):
    """One tensor to lay out."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _WIDTH[self.dtype]


def entries(config: Config) -> Iterator[Entry]:
    """All tensors of the model, layer after layer."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield Entry("model.embed_tokens.weight", "BF16", (vocab, hidden))
    for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        prefix = f"model.layers.{layer}."
        if (
            layer >= config.num_hidden_layers
        ):  # predicts the token after the next, with an embedding and a head of its own
            yield Entry(prefix + "embed_tokens.weight", "BF16", (vocab, hidden))
            yield Entry(prefix + "enorm.weight", "BF16", (hidden,))
            yield Entry(prefix + "hnorm.weight", "BF16", (hidden,))
            yield Entry(prefix + "eh_proj.weight", "BF16", (hidden, 2 * hidden))
            yield Entry(prefix + "shared_head.norm.weight", "BF16", (hidden,))
            yield Entry(prefix + "shared_head.head.weight", "BF16", (vocab, hidden))
        yield from _attention(prefix + "self_attn.", config)
        if layer < config.first_k_dense_replace:
            yield from _mlp(prefix + "mlp.", hidden, config.intermediate_size)
        else:
            yield Entry(prefix + "mlp.gate.weight", "BF16", (config.n_routed_experts, hidden))
            yield Entry(prefix + "mlp.gate.e_score_correction_bias", "F32", (config.n_routed_experts,))
            yield from _mlp(prefix + "mlp.shared_experts.", hidden, config.moe_intermediate_size)
            for expert in range(config.n_routed_experts):
                yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
        yield Entry(prefix + "input_layernorm.weight", "BF16", (hidden,))
        yield Entry(prefix + "post_attention_layernorm.weight", "BF16", (hidden,))
    yield Entry("model.norm.weight", "BF16", (hidden,))
    yield Entry("lm_head.weight", "BF16", (vocab, hidden))


def _attention(prefix: str, config: Config) -> Iterator[Entry]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    keys_values = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield from _quantised(prefix + "q_a_proj", config.q_lora_rank, hidden)
    yield Entry(prefix + "q_a_layernorm.weight", "BF16", (config.q_lora_rank,))
    yield from _quantised(prefix + "q_b_proj", queries, config.q_lora_rank)
    yield from _quantised(prefix + "kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim, hidden)
    yield Entry(prefix + "kv_a_layernorm.weight", "BF16", (config.kv_lora_rank,))
    yield from _quantised(prefix + "kv_b_proj", keys_values, config.kv_lora_rank)
    yield from _quantised(prefix + "o_proj", hidden, heads * config.v_head_dim)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[Entry]:
    yield from _quantised(prefix + "gate_proj", inner, hidden)
    yield from _quantised(prefix + "up_proj", inner, hidden)
    yield from _quantised(prefix + "down_proj", hidden, inner)


def _quantised(name: str, rows: int, columns: int) -> Iterator[Entry]:
    yield Entry(name + ".weight", "F8_E4M3", (rows, columns))
    yield Entry(name + ".weight_scale_inv", "F32", (-(-rows // _BLOCK), -(-columns // _BLOCK)))


def write_huge(folder: str | os.PathLike[str], config: Config | None = None, *, shards: int = 163) -> str:
    """Write the checkpoint, in ``shards`` files of about the same size, and its index into ``folder``, which is returned."""
    parts = _split(list(entries(config or Config())), shards)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{shards:06}.safetensors"
        _write_shard(os.path.join(folder, name), part)
        weight_map |= dict.fromkeys((entry.name for entry in part), name)
    total = sum(entry.nbytes for part in parts for entry in part)
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
    return os.fspath(folder)


def _split(every: list[Entry], shards: int) -> list[list[Entry]]:
    """Cut the list into consecutive parts of about the same number of bytes."""
    total, done = sum(entry.nbytes for entry in every), 0
    parts: list[list[Entry]] = [[] for _ in range(shards)]
    for entry in every:
        parts[min(shards - 1, done * shards // total)].append(entry)
        done += entry.nbytes
    return parts


def _write_shard(path: str, part: list[Entry]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in part:
        begin, end = end, end + prod(shape) * _WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
