"""Which modules a script has made again for the backward: what it calls within ``torch.utils.checkpoint.checkpoint``.

    x = checkpoint(self.block, x, use_reentrant=False)       model.gradient_checkpointing_enable()

What is traced keeps nothing, and makes nothing again: that is what a plan says. So the modules are noted, as patterns
of paths (``layers.*``) that ``Hints(recompute=...)`` takes: the function itself, where it is a module, and else the
modules that it calls, which are made again together (``checkpoint_sequential``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils import checkpoint as torchs

from shardfx.ir.names import pattern, prefixes

GENERATOR = "_checkpoint_without_reentrant_generator"
"""Torch's function that begins and ends a checkpoint that is not reentrant, given what is called in it."""
if hasattr(torchs, f"{GENERATOR}_impl"):  # from torch 2.15 on
    GENERATOR += "_impl"
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Checkpointed:
    """The modules that were called in each of the checkpoints, by path; and whether something else was."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, ...], None] = {}
        self.others = False

    @contextmanager
    def noting(self, model: nn.Module, traced: bool) -> Iterator[None]:
        """Within, checkpoints that the model's code makes are noted; of several runs those of the first, which leaves
        no block out. Those that are ``traced`` keep nothing: what they do to keep it is no part of the model."""
        inside: Any = torchs
        generator, function = getattr(inside, GENERATOR), inside.CheckpointFunction
        paths = {id(each): path for path, each in model.named_modules()}
        called_in = nullcontext if self.calls or self.others else partial(self._called, paths=paths)

        def noted(called: Any, *rest: Any, **options: Any) -> Iterator[None]:
            with called_in(called):
                yield from (None,) if traced else generator(called, *rest, **options)

        def applied(called: Any, *rest: Any) -> Any:
            with called_in(called):
                return _reentrant(called, *rest) if traced else function.apply(called, *rest)

        setattr(inside, GENERATOR, noted)
        inside.CheckpointFunction = SimpleNamespace(apply=applied)
        try:
            yield
        finally:
            setattr(inside, GENERATOR, generator)
            inside.CheckpointFunction = function

    @contextmanager
    def _called(self, function: Any, paths: Mapping[int, str]) -> Iterator[None]:
        """The module that a function is; else the outermost modules that are called within."""
        if (own := _module(function)) is not None and paths.get(id(own)):
            self.calls[(paths[id(own)],)] = None
            yield
            return
        depth, found = [0], list[str]()

        def enter(module: nn.Module, given: Any) -> None:
            if not depth[0] and paths.get(id(module)):
                found.append(paths[id(module)])
            depth[0] += 1

        def leave(module: nn.Module, given: Any, result: Any) -> None:
            depth[0] -= 1

        hooks = modules.register_module_forward_pre_hook(enter), modules.register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if found:
            self.calls[tuple(dict.fromkeys(found))] = None
        self.others |= not found

    def patterns(self, model: nn.Module, there: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """The modules as patterns, those of one call together: one for a list of which all are called by themselves;
        none where nothing is ``there``."""
        every, left = [path for path, _ in model.named_modules()], {p for path in there for p in prefixes(path)}
        alone = {call[0] for call in self.calls if len(call) == 1}
        found: dict[tuple[str, ...], None] = {}
        for call in self.calls:
            listed = NUMBER.sub("*", call[0])
            matches = [each for each in every if pattern(listed).fullmatch(each)]
            found[(listed,) if len(call) == 1 and alone.issuperset(matches) else call] = None
        matched = (tuple(text for text in texts if any(map(pattern(text).fullmatch, left))) for texts in found)
        return tuple(texts for texts in matched if texts)


def _reentrant(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """What ``checkpoint(..., use_reentrant=True)`` computes: it has a gradient where one of its inputs has."""
    with torch.set_grad_enabled(any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)):
        return function(*args)


def _module(function: Any) -> nn.Module | None:
    """The module that a function is the call of."""
    given: tuple[Any, ...] = ()
    while isinstance(function, partial):
        function, given = function.func, (*function.args, *given)
    if isinstance(function, nn.Module):
        return function
    owner, method = getattr(function, "__self__", None), getattr(function, "__func__", None)
    if isinstance(owner, nn.Module):
        return owner if method in (type(owner).__call__, nn.Module.__call__, type(owner).forward) else None
    forward = getattr(function, "__name__", "") == "forward"  # partial(forward, self), as transformers has it
    return given[0] if forward and given and isinstance(given[0], nn.Module) else None
