"""Effects of calls (results, allocations, FLOPs), found by running each distinct call once on fake tensors.

>>> calls = FakeCalls()
>>> x = Layout((64, 32), (32, 1), torch.float32)
>>> calls.made(aten.t.default, (x,), {})        # a view of its operand 0
Made(results=Result(Layout((32, 64), (1, 32), ...), owner=0), fresh=(), inside=0, flops=0)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.spec import strides_of

from . import flops

c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The memory layout of a tensor: shape, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: torch.dtype, dim_order: Sequence[int] = ()) -> TensorLayout:
        """A dense layout; ``dim_order``: the dims from the slowest to the fastest, if not row-major."""
        return cls(tuple(shape), strides_of(shape, dim_order), dtype)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def is_dense(self) -> bool:
        """Whether the layout is contiguous (row-major)."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    @property
    def nbytes(self) -> int:
        """The bytes of distinct elements: an expanded dim counts once."""
        sizes = (size for size, stride in zip(self.shape, self.stride, strict=True) if stride or not size)
        return self.dtype.itemsize * torch.Size(sizes).numel()


@dataclass(frozen=True, slots=True)
class Result:
    """A result tensor: its layout, and the index of its owner (an operand, or a fresh storage), at an offset."""

    layout: TensorLayout
    owner: int
    fresh: bool = False
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CallEffect:
    """The effect of a call: its results, nested as returned; the bytes of ``fresh`` storages among them; the peak
    ``inside`` it, those included; its FLOPs; whether it ``writes``, to fresh memory or an operand's."""

    results: Any
    fresh: tuple[int, ...] = ()
    inside: int = 0
    flops: float = 0.0
    writes: bool = False


def aliased_argument(target: Any) -> int | str | None:
    """The argument, by index or name, that a call returns (``mm.out``: ``"out"``), or None if there is none for
    certain. Such a call allocates nothing, though on fake tensors it may seem to."""
    if target is c10d.wait_tensor.default:
        return 0
    schema = target._schema if isinstance(target, torch._ops.OpOverload) else None
    if schema is None or len(schema.returns) != 1:
        return None
    memory = _written(schema.returns[0])
    found = ((i, a) for i, a in enumerate(schema.arguments) if memory & _written(a))
    return next((a.name if a.kwarg_only else i for i, a in found), None)


def observed_operand(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorLayout | None:
    """The operand that a call of a probe observes and returns (inserted by a user's pass): the call is not run."""
    row = row_of(target)
    if row is None or not row.shares or row.into is not None or row.plain is None:
        return None
    plain = row.plain(tuple(args), dict(kwargs))
    return plain if isinstance(plain, TensorLayout) else None


def _written(part: Any) -> frozenset[str]:
    """The alias set of an argument or result in a schema, if it is written."""
    info = part.alias_info
    return frozenset(info.before_set) if info is not None and info.is_write else frozenset()


class CallError(Error):
    """A call that fails on fake tensors, and its node."""

    node: str = ""


def call_error(node: fx.Node, error: Exception) -> CallError:
    """The error of a call, with its node and the line of the model that it comes from."""
    made = node.meta.get("shardfx")
    said = next(iter(str(error).splitlines()), type(error).__name__)
    line = str(made.where) if isinstance(made, Node) else ""
    found = CallError(f"{node.name} cannot be run: {said}", where="; ".join(filter(None, (node.format_node(), line))))
    found.node = node.name
    return found


class FakeCalls:
    """Runs calls on fake tensors; effects are cached by target and layouts."""

    def __init__(self) -> None:
        self._known: dict[Any, CallEffect] = {}
        self._mode = FakeTensorMode()

    def made(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallEffect:
        """The effect of a call; tensors among the arguments are given as :class:`TensorLayout`."""
        key = (target, _key(args), _key(kwargs))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._run(target, args, kwargs)
        return found

    def _run(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallEffect:
        same = observed_operand(target, args, kwargs)
        if same is not None:
            number = next(i for i, each in enumerate(leaves((args, kwargs), TensorLayout)) if each is same)
            return CallEffect(Result(same, number))
        fakes: list[torch.Tensor] = []

        def fake(layout: TensorLayout) -> torch.Tensor:
            fakes.append(torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype))
            return fakes[-1]

        with self._mode:
            positional, named = map_nest(args, fake, TensorLayout), map_nest(dict(kwargs), fake, TensorLayout)
            with _AllocationProbe(fakes) as watch:
                out = target(*positional, **named)
        owners = {f.untyped_storage()._cdata: i for i, f in enumerate(fakes)}
        fresh: dict[int, int] = {}

        def result(tensor: torch.Tensor) -> Result:
            layout = TensorLayout(tuple(map(int, tensor.shape)), tensor.stride(), tensor.dtype)
            storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
            if storage._cdata in owners:
                return Result(layout, owners[storage._cdata], offset=offset)
            fresh.setdefault(storage._cdata, storage.nbytes())
            return Result(layout, list(fresh).index(storage._cdata), fresh=True, offset=offset)

        results, sizes = map_nest(out, result, torch.Tensor), tuple(fresh.values())
        return CallEffect(results, sizes, max(watch.most, sum(sizes)), watch.flops, watch.writes or bool(sizes))


class _AllocationProbe(TorchDispatchMode):
    """Observes the ops inside a call: their FLOPs, whether they write, and the peak of fresh storages."""

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operands = {tensor.untyped_storage()._cdata for tensor in operands}
        self._tensors: list[tuple[weakref.ref[torch.Tensor], int, int]] = []
        self.most, self.flops, self.writes = 0, 0.0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, same, count = kwargs or {}, aliased_argument(func), flops.formula(func)
        out = func(*args, **named)
        if same is not None:
            out = named[same] if isinstance(same, str) else args[same]
        if count is not None:
            self.flops += float(count(*args, **named, out_val=out))
        self.writes = self.writes or func._schema.is_mutable
        for tensor in leaves(out, torch.Tensor):
            storage = tensor.untyped_storage()
            self._tensors.append((weakref.ref(tensor), storage._cdata, storage.nbytes()))
        self._tensors = [each for each in self._tensors if each[0]() is not None]
        there = {key: size for _, key, size in self._tensors if key not in self._operands}
        self.most = max(self.most, sum(there.values()))
        return out


def map_nest(nest: Any, with_: Callable[[Any], Any], kind: type) -> Any:
    """A nest of lists, tuples and dicts with everything of a kind mapped."""
    return fx.node.map_aggregate(nest, lambda each: with_(each) if isinstance(each, kind) else each)


def leaves(nest: Any, kind: type) -> list[Any]:
    """The leaves of a kind in a nest of lists, tuples and dicts."""
    found: list[Any] = []
    map_nest(nest, found.append, kind)
    return found


def _key(arg: Any) -> Any:
    """A cache key of arguments."""
    if isinstance(arg, (list, tuple)):
        return tuple(_key(each) for each in arg)
    if isinstance(arg, dict):
        return tuple((key, _key(each)) for key, each in arg.items())
    return (type(arg), arg) if arg.__hash__ else repr(arg)
