"""The recorder of a replay: it takes the calls of a rank's program, and keeps account of storages and flops.

>>> recorder = Recorder()
>>> writer = Writer(graph, rank, book, fx=recorder)      # what would write an fx graph writes here
>>> for node in graph.nodes: writer.node(node)
>>> recorder.peak().nbytes
1835008
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardfx.ir.graph import Input, Node, Phase
from shardfx.ir.ops.comm import CommOp
from shardfx.ir.ops.fused_attention import attention, attention_backward


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is known of a tensor: its layout, and the storage that it is a view of."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: Storage

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


c10d = torch.ops._c10d_functional
aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class Storage:
    """A block of memory: who made it, in which call, and in which it is used last."""

    nbytes: int
    node: Node | None
    born: int
    last: int
    category: str = ""
    kept: bool = False
    used_in: Phase | None = None


@dataclass(eq=False, slots=True)
class Call:
    """What stands for an fx node while the program is written: the tensors that a call gives."""

    name: str
    result: Any
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """Something that is held at a moment: what it is for, its bytes, and the node that made it."""

    category: str
    nbytes: int
    node: Node | None


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held, beside the inputs."""

    nbytes: int = 0
    node: Node | None = None
    held: tuple[Held, ...] = ()

    def of(self, category: str) -> int:
        return sum(held.nbytes for held in self.held if held.category == category)


class Recorder:
    """Takes the place of an ``fx.Graph`` (and has those of its methods that the code generator calls).

    It runs each distinct call on fake tensors, and keeps account of storages.
    """

    def __init__(self) -> None:
        self.node: Node | None = None
        self.next_input: tuple[Input, tuple[int, ...]] | None = None
        self.count = 0
        self.storages: list[Storage] = []
        self.work: list[tuple[int, int]] = []
        self._makers: list[Node | None] = []
        self._known: dict[Any, tuple[Any, int]] = {}
        self._mode = FakeTensorMode()

    def placeholder(self, name: str) -> Call:
        assert self.next_input is not None
        given, shape = self.next_input
        dtype = given.value.type.dtype
        storage = Storage(0, None, 0, 0)
        return Call(name, Tensor(shape, _contiguous(shape), dtype, storage))

    def create_node(self, kind: str, target: Any, args: Any = (), kwargs: Any = None, name: str | None = None) -> Call:
        assert kind == "call_function", kind
        return self.call_function(target, args, kwargs)

    def call_function(self, target: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Call:
        call = Call(f"call{self.count}", None)
        operands: list[Tensor] = []
        for each in _calls((*args, kwargs or {}), []):
            operands += self._touch(each)
        if target is operator.getitem:
            call.result = args[0].result[args[1]]
        elif target is c10d.wait_tensor.default:
            call.result = args[0].result
        else:
            key = (target, _key(args), _key(kwargs))
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = self._run(target, args, kwargs or {}, operands)
            made, flops = found
            call.result, fresh = self._bind(made, operands)
            if not isinstance(self.node.op if self.node else None, CommOp) and fresh:
                self.work.append((flops, fresh + sum(t.nbytes for t in operands)))
        self._makers.append(self.node)
        self.count += 1
        return call

    def mark(self, call: Call, category: str) -> None:
        """Say what the memory of a result is for."""
        for tensor in _tensors(call.result):
            tensor.storage.category = tensor.storage.category or category

    def keep(self, call: Call, category: str) -> None:
        """The tensor is an output: it lives to the end."""
        self.mark(call, category)
        for tensor in self._touch(call):
            tensor.storage.kept = True

    def _touch(self, call: Call) -> list[Tensor]:
        """The tensors of a call that is used now."""
        tensors = list(_tensors(call.result))
        for tensor in tensors:
            tensor.storage.last = self.count
            tensor.storage.used_in = self.node.phase if self.node else None
        return tensors

    def _run(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Tensor]) -> tuple[Any, int]:
        """Run a call on fake tensors; gives its results as layouts (an alias says of which operand), and its flops."""
        with self._mode:
            fakes = [torch.empty_strided(t.shape, t.stride, dtype=t.dtype) for t in operands]
            at = iter(fakes)

            def fake(call: Call) -> Any:
                return _change(call.result, lambda _: next(at))

            given, named = _swap(args, fake), _swap(kwargs, fake)
            out = target(*given, **named)
            count = FLOPS.get(target) or flop_registry.get(getattr(target, "overloadpacket", None))
            flops = int(count(*given, **named, out_val=out)) if count is not None else 0
        owners = {f.untyped_storage()._cdata: i for i, f in enumerate(fakes)}

        def layout(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            source = owners.get(storage._cdata, -1 - storage._cdata)
            return _Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, source, storage.nbytes())

        return _change(out, layout), flops

    def _bind(self, made: Any, operands: list[Tensor]) -> tuple[Any, int]:
        """The results of a call from their layouts; and how many bytes are new."""
        fresh: dict[int, Storage] = {}

        def tensor(layout: _Layout) -> Tensor:
            storage = operands[layout.source].storage if layout.source >= 0 else fresh.get(layout.source)
            if storage is None:
                storage = fresh[layout.source] = Storage(layout.nbytes, self.node, self.count, self.count)
                self.storages.append(storage)
            return Tensor(layout.shape, layout.stride, layout.dtype, storage)

        return _change(made, tensor), sum(storage.nbytes for storage in fresh.values())

    def peak(self) -> Peak:
        """The call during which most is held: what it uses, and what it makes, is there at once."""
        if not self.count:
            return Peak()
        change = [0] * (self.count + 1)
        for storage in self.storages:
            if storage.kept:
                storage.last = self.count - 1
            change[storage.born] += storage.nbytes
            change[storage.last + 1] -= storage.nbytes
        held = list(itertools.accumulate(change[:-1]))
        top = max(range(self.count), key=held.__getitem__)
        there = [s for s in self.storages if s.born <= top <= s.last and s.nbytes]
        there.sort(key=lambda s: -s.nbytes)
        return Peak(held[top], self._makers[top], tuple(Held(_category(s), s.nbytes, s.node) for s in there))


@dataclass(frozen=True, slots=True)
class _Layout:
    """A result of a call: ``source`` is the operand that it is a view of, or (negative) a fresh storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    source: int
    nbytes: int


def _category(storage: Storage) -> str:
    if storage.category:
        return storage.category
    if storage.node is not None and storage.node.phase is Phase.FORWARD and storage.used_in is Phase.BACKWARD:
        return "activations"
    return "temporaries"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = itertools.accumulate([1, *reversed(shape[1:])], lambda a, b: a * max(b, 1))
    return tuple(strides)[: len(shape)][::-1]


def _calls(arg: Any, found: list[Call]) -> list[Call]:
    """The calls among arguments, in order."""
    for each in arg.values() if isinstance(arg, dict) else arg:
        if isinstance(each, Call):
            found.append(each)
        elif isinstance(each, (list, tuple, dict)):
            _calls(each, found)
    return found


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from _tensors(each)


def _change(result: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest of results with every tensor changed."""
    if isinstance(result, (list, tuple)):
        return [_change(each, change) for each in result]
    return change(result) if isinstance(result, (Tensor, _Layout, torch.Tensor)) else result


def _swap(arg: Any, change: Callable[[Call], Any]) -> Any:
    if isinstance(arg, Call):
        return change(arg)
    if isinstance(arg, (list, tuple)):
        return type(arg)(_swap(each, change) for each in arg)
    if isinstance(arg, dict):
        return {key: _swap(each, change) for key, each in arg.items()}
    return arg


def _key(arg: Any) -> Any:
    """Equal for arguments that make a call do the same: tensors by their layout."""
    if isinstance(arg, Call):
        return _key(arg.result)
    if isinstance(arg, Tensor):
        return (arg.shape, arg.stride, arg.dtype)
    if isinstance(arg, (list, tuple)):
        return tuple(_key(each) for each in arg)
    if isinstance(arg, dict):
        return tuple((key, _key(each)) for key, each in arg.items())
    return (type(arg), arg) if arg.__hash__ else repr(arg)


def _attention(q: Any, k: Any, v: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    return sdpa_flop_count(q.shape, *_of_each_query_head(q, k, v))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    return sdpa_backward_flop_count(grad.shape, q.shape, *_of_each_query_head(q, k, v))


def _of_each_query_head(q: Any, k: Any, v: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of keys and values as if each query head had its own, which is what the count asks for."""
    return tuple((t.shape[0], q.shape[1], *t.shape[2:]) for t in (k, v))


FLOPS: dict[Any, Callable[..., Any]] = {
    attention: _attention,
    attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
"""What torch's own table of flops leaves out."""
