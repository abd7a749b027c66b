"""Probes around a traced forward, for what it does beside computing.

- :class:`CheckpointedModules`: the modules that it calls within ``torch.utils.checkpoint``; a trace recomputes nothing,
  and a plan does, so they become patterns (``layers.*``) that ``Hints(recompute=...)`` takes.
- :class:`AssignedBuffers`: buffers that it replaces are written into instead, for programs have the model's buffers::

      self.low = torch.min(self.low, x.amin())    ->    low.copy_(torch.min(low.clone(), x.amin()))

"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils import checkpoint as torchs

from shardfx.ir.errors import Error
from shardfx.ir.names import pattern, prefixes

GENERATOR = "_checkpoint_without_reentrant_generator"
"""Torch's generator around a non-reentrant checkpoint, which takes the function that is called in it."""
if hasattr(torchs, f"{GENERATOR}_impl"):  # from torch 2.15 on
    GENERATOR += "_impl"
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class CheckpointedModules:
    """The modules that were called in each checkpoint, by path; and whether a checkpoint called something else."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, ...], None] = {}
        self.others = False

    @contextmanager
    def noting(self, model: nn.Module, traced: bool) -> Iterator[None]:
        """Within, checkpoints of the model's code are recorded; of several runs those of the first, which leaves no
        block out. Those that are ``traced`` save nothing: how they do is no part of the model."""
        generator, function = getattr(torchs, GENERATOR), torchs.CheckpointFunction
        called_in = nullcontext if self.calls or self.others else partial(self._called, model)

        def noted(called: Any, *rest: Any, **options: Any) -> Iterator[None]:
            with called_in():
                yield from (None,) if traced else generator(called, *rest, **options)

        def applied(called: Any, *rest: Any) -> Any:
            with called_in():
                return _reentrant(called, *rest) if traced else function.apply(called, *rest)

        reentrant = mock.patch.object(torchs, "CheckpointFunction", SimpleNamespace(apply=applied))
        with reentrant, mock.patch.object(torchs, GENERATOR, noted):
            yield

    @contextmanager
    def _called(self, model: nn.Module) -> Iterator[None]:
        """Record the outermost modules that are called within."""
        paths, depth, found = {id(each): path for path, each in model.named_modules()}, [0], list[str]()

        def enter(module: nn.Module, value: Any) -> None:
            if not depth[0] and paths.get(id(module)):
                found.append(paths[id(module)])
            depth[0] += 1

        def leave(module: nn.Module, value: Any, result: Any) -> None:
            depth[0] -= 1

        hooks = modules.register_module_forward_pre_hook(enter), modules.register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.add(found, model)

    def add(self, paths: Sequence[str], model: nn.Module) -> None:
        """Note a checkpoint in which these modules are called; where they are all children of one, its ``forward``."""
        called = tuple(dict.fromkeys(paths))
        parent = called[0].rpartition(".")[0] if len(called) > 1 else ""
        children = {f"{parent}.{name}" for name, _ in model.get_submodule(parent).named_children()}
        if called:
            self.calls[(parent,) if parent and children == {*called} else called] = None
        self.others |= not called

    def patterns(self, model: nn.Module, there: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """The modules as patterns, by call: one for a list whose blocks are all called alone; none where nothing is
        ``there``."""
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
    """``checkpoint(..., use_reentrant=True)``, which has a gradient where one of its inputs has."""
    with torch.set_grad_enabled(any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)):
        return function(*args)


class AssignedBuffers:
    """The buffers that a program's forward replaces: known once it ran."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @contextmanager
    def noting(self, program: nn.Module, *, written: bool) -> Iterator[None]:
        """Within, buffers may be replaced. ``written``: afterwards they are the original ones, and those that are known
        to be replaced have the content of the new ones.

        Raises:
            Error: a new one has another shape or dtype, or a gradient; there is none any more; or a parameter is
                another.
        """
        entries = {
            f"{path}.{name}": (held, name, was, held is module._parameters)
            for path, module in program.named_modules()
            for held in (module._buffers, module._parameters)
            for name, was in held.items()
            if was is not None  # what was None is looked at beside other attributes
        }
        known = {path: entry for path, entry in entries.items() if written and path in self.names}
        copies = {was: was.clone() for was in dict.fromkeys(was for _, _, was, _ in known.values())}
        for held, name, was, _ in known.values():
            held[name] = copies[was]
        try:
            yield
        finally:
            now = {path: held.get(name) for path, (held, name, *_) in entries.items()}
            for held, name, was, _ in entries.values() if written else ():
                held[name] = was
        values = defaultdict[int, set[int]](set)
        for path, (_, _, was, _) in entries.items():
            values[id(was)].add(id(now[path]))
        for path, (_, _, was, is_parameter) in entries.items():
            if now[path] is not was and now[path] is not copies.get(was):
                _check(path.removeprefix("model."), was, now[path], len(values[id(was)]) == 1, is_parameter)
                self.names.add(path)
        with torch.no_grad():
            # Several may have changed places, and one may be a view of what it is written into.
            made = [(was, value.clone()) for path, (_, _, was, _) in known.items() if (value := now[path]) is not None]
            for was, value in made:
                was.copy_(value)


def _check(name: str, was: Tensor, now: Tensor | None, everywhere: bool, is_parameter: bool) -> None:
    alike = now is not None and (now.shape, now.dtype) == (was.shape, was.dtype) and not now.requires_grad
    if is_parameter:
        raise Error(
            "the model puts something else in a parameter's place",
            where=name,
            expected="the parameter that it has",
            got="no such parameter" if now is None else "another one",
            remedy="compute with the new tensor, and let an optimizer change parameters",
        )
    if alike and everywhere:
        return
    if alike:
        raise Error(
            "the model puts something else in the place of a buffer that has other names too",
            where=name,
            expected="the same tensor under all of them",
            got="another one under this name alone",
            remedy="write into it under torch.no_grad() (buffer.copy_(...)), or register two buffers",
        )
    both = was, was if now is None else now
    wanted, got = (f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in both)
    got = f"{got}, with a gradient" if now is not None and now.requires_grad else got
    raise Error(
        "the model puts something else in a buffer's place",
        where=name,
        expected=f"a tensor as it was, {wanted}, without a gradient",
        got="None, or no such buffer" if now is None else got,
        remedy="detach() what becomes a buffer; register it in the shape that it takes, or call the model once before; "
        "what only this call needs is no buffer",
    )
