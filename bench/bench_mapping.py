"""Mapping names: 100,000 of them by 500 rules of each kind, and beside vLLM's own class where vLLM is installed.

    python -m pytest bench/bench_mapping.py

The rules have mixed first letters, as a large model's have. vLLM's class maps the same names by the same rules; it is
asked for 20,000 of them, since it takes long.
"""

from __future__ import annotations

from typing import Any

import pytest

from streamload import WeightsMapper

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = [
    f"model.layers.{n % 61}.{LETTERS[n % 26]}block.experts.{n % 257}.{LETTERS[n // 26 % 26]}_proj.weight"
    for n in range(100_000)
]


def rules(kind: str, count: int = 500) -> dict[str, Any]:
    """``count`` rules of one kind; few of them hit."""
    words = [f"{LETTERS[n % 26]}{LETTERS[n // 26 % 26]}word{n}" for n in range(count)]
    if kind == "substr":
        return {"orig_to_new_substr": {f".{word}.": f".{word}_new." for word in words}}
    if kind == "prefix":
        return {"orig_to_new_prefix": {f"{word}.": f"model.{word}." for word in words}}
    if kind == "suffix":
        return {"orig_to_new_suffix": {f".{word}": f".{word}_new" for word in words}}
    return {"orig_to_new_stacked": {f".{word}": (f".{word}_fused", n) for n, word in enumerate(words)}}


def mixed() -> dict[str, Any]:
    """A quarter of each kind."""
    return {key: value for kind in KINDS for key, value in rules(kind, 125).items()}


KINDS = ("substr", "prefix", "suffix", "stacked")
CASES = {**{kind: rules(kind) for kind in KINDS}, "mix": mixed()}


@pytest.mark.parametrize("kind", CASES)
def test_ours(benchmark: Any, kind: str) -> None:
    def run() -> int:
        mapper = WeightsMapper(**CASES[kind])  # compiled anew, and nothing remembered
        return sum(mapper.map(name) is not None for name in NAMES)

    assert benchmark.pedantic(run, rounds=3) == len(NAMES)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("whose", ["ours", "vllm"])
def test_beside_vllm(benchmark: Any, kind: str, whose: str) -> None:
    if whose == "vllm":
        utils = pytest.importorskip("vllm.model_executor.models.utils", reason="vLLM is not installed")
        made = utils.WeightsMapper
    else:
        made = WeightsMapper
    few = NAMES[:20_000]

    def run() -> int:
        return len(made(**CASES[kind]).apply_list(few))

    assert benchmark.pedantic(run, rounds=3) == len(few)
