"""Modules' own ``load_weights`` and parameters' own ``weight_loader``: they are called, and what they write is watched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streamload.errors import LoadError
from streamload.loading.feed import Feed
from streamload.loading.handed import Handed
from streamload.loading.keys import Keys
from streamload.loading.observed import Observed, Observer, watching
from streamload.loading.room import make_room
from streamload.loading.targets import RUNNING, Targets
from streamload.mapping.rules import Expert, Place
from streamload.sources.lent import Lender


class Hooks:
    """The hooks of one load. What they fill gets its memory when the first tensor is handed to them."""

    def __init__(self, targets: Targets, device: torch.device | None, keys: Keys, budget: int, *, lends: bool) -> None:
        """``budget``: bytes that may be cloned. ``lends``: whether tensors are valid only until the next is asked for."""
        self._targets, self._device, self._keys = targets, device, keys
        self._budget, self._lends = budget, lends
        self._expected: dict[str, list[str]] = {}
        self._stored: dict[str, str] = {}
        """Full name as it is handed on -> the one that it is stored under."""
        self._handed: list[Handed] = []
        self._feeds: dict[str, Feed] = {}
        self._observed: dict[str, Observed] = {}
        self._given: dict[str, tuple[nn.Module, Tensor]] = {}
        """Targets that hooks fill: the module and the tensor that it had."""
        self._reported: dict[str, str] = {}
        """Targets that a hook says it has loaded -> its title."""
        self.raised: BaseException | None = None
        """What a hook raised."""

    def expect(self, names: Iterable[str]) -> None:
        """All ``names``, in full, that will be handed to modules inside, where they are known beforehand."""
        for name in names:
            if loader := self._targets.loader_of(name):
                self._expected.setdefault(loader, []).append(name[len(loader) :])

    @property
    def clones(self) -> tuple[int, int]:
        """How many tensors hooks of ours have cloned, and their bytes."""
        return sum(each.clones for each in self._handed), sum(each.clone_bytes for each in self._handed)

    def give(self, place: Place, stored: str, tensor: Tensor) -> None:
        """Hand a tensor to the hook that ``place`` belongs to. Raises what the hook raises."""
        try:
            loader = self._targets.loader_of(place.name)
            if loader is not None:
                self._stored[place.name] = stored
                self._feed(loader).give(place.name[len(loader) :], tensor)
            else:
                self._write(place, stored, tensor)
        except BaseException as error:
            self.raised = error
            raise

    def run(self, origin: Any, items: Iterator[Any], take: Callable[[Any], tuple[str, Tensor]]) -> None:
        """Let the ``load_weights`` of the module itself take in ``items``, which are made of ``origin``, in this thread."""
        module, observed = self._targets.loaders[""], self._watch("", [*self._targets.specs])
        lender = Lender(_title(module)) if self._lends else None
        handed = self._hand(Handed(origin, items, take, self._keys, self._budget, lender))
        try:
            with Observer(observed), watching(observed):
                self._report("", _title(module), _consume(module, handed))
        except BaseException as error:
            self.raised = error
            raise

    def _hand(self, handed: Handed) -> Handed:
        self._handed.append(handed)
        return handed

    def finish(self) -> None:
        """The stream has ended: let every module finish, once."""
        try:
            for loader, feed in self._feeds.items():
                feed.finish()
                self._report(loader, feed.title, feed.result)
        except BaseException as error:
            self.raised = error
            raise

    def close(self) -> None:
        """Let those that wait for more end without it."""
        for feed in self._feeds.values():
            feed.abandon()

    def _feed(self, loader: str) -> Feed:
        feed = self._feeds.get(loader)
        if feed is None:
            module = self._targets.loaders[loader]
            observed = self._watch(loader, [name for name in self._targets.specs if name.startswith(loader)])

            names = self._expected.get(loader)

            def consume(items: Iterator[tuple[str, Tensor]]) -> Any:
                origin = None if names is None else dict.fromkeys(names)
                books = (self._keys, self._budget, None, lambda name: self._stored.get(loader + name, loader + name))
                handed = self._hand(Handed(origin, items, tuple, *books))
                with Observer(observed), watching(observed):
                    return _consume(module, handed)

            feed = Feed(f"{loader.rstrip('.')}: {_title(module)}", consume, lends=self._lends)
            self._feeds[loader] = feed
            feed.start()
        if feed.ended:
            raise LoadError(
                f"{feed.title} returned before its stream had ended; it has to take every tensor that it is given, also those "
                "that it does not need"
            )
        return feed

    def _write(self, place: Place, stored: str, tensor: Tensor) -> None:
        target = self._targets.first(place.name).name
        observed = self._observed[target] if target in self._observed else self._watch(target, [target])
        parameter, writer = self._targets.tensors[target], self._targets.writers[place.name]
        if place.transposed:
            tensor = tensor.transpose(-1, -2)
        with Observer(observed):
            _call(writer, parameter, tensor, stored, place.shard)

    def _watch(self, hook: str, names: list[str]) -> Observed:
        """Give ``names`` memory, in one piece each, and watch them from now on."""
        assert self._targets.module is not None
        make_room(self._targets, names, self._device, keep=names)
        for name in names:
            path, _, _ = name.rpartition(".")
            self._given[name] = (self._targets.module.get_submodule(path), self._targets.tensors[name].detach())
        self._targets.touched = True
        self._observed[hook] = Observed({name: self._given[name][1] for name in names})
        return self._observed[hook]

    def _report(self, loader: str, title: str, result: Any) -> None:
        names = result if isinstance(result, Iterable) and not isinstance(result, (str, Tensor)) else ()
        self._reported |= {f"{loader}{name}": title for name in names if isinstance(name, str)}

    def conclude(self, keys: Keys, elements: dict[str, int]) -> None:
        """Say in ``elements`` how much of every target the hooks have written, and in ``keys`` where that is not all."""
        for hook, observed in self._observed.items():
            for name in self._names(hook):
                size, done = self._given[name][1].numel(), observed.elements(name)
                if self._replaced(name):
                    keys.notes.append(f"{name}: replaced by the module's own load_weights")
                    done = size
                elements[name] = done
                if done < size:
                    said = self._reported.get(name)
                    told = f", though {said} reports it as loaded" if said else ""
                    told += "" if done else " (writes through numpy, or by threads of its own, are not seen)"
                    keys.partly.setdefault(name, f"{done:,} of {size:,} elements were written{told}")

    def _names(self, hook: str) -> list[str]:
        loads = not hook or hook in self._targets.loaders
        return [name for name in self._given if name.startswith(hook)] if loads else [hook]

    def _replaced(self, name: str) -> bool:
        """Whether there is other memory now than there was: a module may do so when it finishes."""
        now = self._now(name)
        return now is not None and not now.is_meta and now.data_ptr() != self._given[name][1].data_ptr()

    def _now(self, name: str) -> Tensor | None:
        owner, key = self._given[name][0], name.rpartition(".")[2]
        return owner._parameters.get(key, owner._buffers.get(key))

    @property
    def touched(self) -> list[str]:
        """Targets that hooks may have written to, and that are still there."""
        return [name for name in self._given if self._now(name) is not None]


def _title(module: nn.Module) -> str:
    return f"{type(module).__name__}.load_weights"


def _consume(module: Any, handed: Handed) -> Any:
    running, current = RUNNING.set(RUNNING.get() | {id(module)}), Handed.current.set(handed)
    try:
        result = module.load_weights(handed)
        return list(result) if isinstance(result, Iterator) else result  # one that yields names has not begun yet
    finally:
        RUNNING.reset(running)
        Handed.current.reset(current)


def _call(writer: Any, parameter: Tensor, tensor: Tensor, stored: str, shard: Any) -> None:
    """Call a ``weight_loader`` in the way that its signature asks for."""
    if isinstance(shard, Expert):
        takes = inspect.signature(writer).parameters
        if "expert_id" in takes:
            writer(parameter, tensor, stored, shard_id=shard.shard, expert_id=shard.number)
            return
        raise LoadError(
            f"{stored}: goes to expert {shard.number}, but the parameter's weight_loader takes no expert_id"
        )
    if shard is None:
        writer(parameter, tensor)
    elif isinstance(shard, list):
        for each in shard:
            writer(parameter, tensor, each)
    else:
        writer(parameter, tensor, shard)
