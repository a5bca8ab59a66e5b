"""Small classes of the kinds that are adapted: with a loader of their own, without one, with others inside."""

import torch
from torch import nn

from streamload import WeightsMapper


def parameter(*shape):
    return nn.Parameter(torch.full(shape, -1.0), requires_grad=False)


def module(**parameters):
    made = nn.Module()
    for name, each in parameters.items():
        made.register_parameter(name, each)
    return made


class Recording(nn.Module):
    """Its ``load_weights`` maps once and copies; it records what it got and in which state the stream was."""

    hf_to_vllm_mapper: WeightsMapper | None = None

    def __init__(self):
        super().__init__()
        self.got = []
        self.calls = 0
        self.at_start = None
        self.watch = None
        """Called when loading begins; what it returns is kept."""

    def load_weights(self, weights):
        self.calls += 1
        self.at_start = self.watch() if self.watch else None
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            self.got.append(name)
            mapped = self.hf_to_vllm_mapper.map_name(name) if self.hf_to_vllm_mapper else name
            if mapped is None:
                continue
            mapped = self.rename(mapped)
            if mapped not in parameters:
                raise ValueError(f"no parameter {mapped}")
            parameters[mapped].data.copy_(tensor)
            loaded.add(mapped)
        return loaded

    def rename(self, name):
        return name


class GemmaLike(Recording):
    """The checkpoint's names begin with ``model.language_model.``, the module's with ``language_model.model.``."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "language_model.model.", "model.audio_tower.": None}
    )

    def __init__(self, layers=4, size=4):
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.model = nn.Module()
        self.language_model.model.embed_tokens = module(weight=parameter(size))
        self.language_model.model.layers = nn.ModuleList(module(weight=parameter(size)) for _ in range(layers))


def gemma_like(layers=4, size=4):
    """What is stored of it, in the order of a file."""
    tensors = {"model.language_model.embed_tokens.weight": torch.full((size,), 0.5)}
    for n in range(layers):
        tensors[f"model.language_model.layers.{n}.weight"] = torch.full((size,), float(n + 1))
    return tensors


def check_gemma(model):
    body = model.language_model.model
    assert body.embed_tokens.weight.eq(0.5).all()
    for n, layer in enumerate(body.layers):
        assert layer.weight.eq(n + 1).all(), n


class Causal(Recording):
    """``model`` and ``lm_head``, with a loader of its own."""

    def __init__(self, layers=2, vocab=2000, hidden=4, tied=False):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, hidden)
        self.model.layers = nn.ModuleList(module(weight=parameter(hidden)) for _ in range(layers))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class PlainCausal(nn.Module):
    """The same without a loader of its own."""

    def __init__(self, layers=2, vocab=2000, hidden=4, tied=False):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, hidden)
        self.model.layers = nn.ModuleList(module(weight=parameter(hidden)) for _ in range(layers))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def causal(prefix="model.", layers=2, vocab=2000, hidden=4, head=True):
    """What is stored of them; the head comes first, as its name sorts."""
    tensors = {"lm_head.weight": torch.arange(vocab * hidden).view(vocab, hidden) + 100.0} if head else {}
    tensors[f"{prefix}embed_tokens.weight"] = torch.arange(vocab * hidden).view(vocab, hidden) + 0.0
    for n in range(layers):
        tensors[f"{prefix}layers.{n}.weight"] = torch.full((hidden,), n + 1.0)
    return tensors


def check_causal(model, vocab=2000, hidden=4):
    assert torch.equal(model.model.embed_tokens.weight, torch.arange(vocab * hidden).view(vocab, hidden) + 0.0)
    for n, layer in enumerate(model.model.layers):
        assert layer.weight.eq(n + 1).all(), n
    assert not [name for name, _ in model.named_parameters() if name.startswith("lm_head")]
