"""Ops that are called, below autograd, as nodes of an fx graph.

Torch's own tracer asks several modes in Python about each call. Here one mode writes the node, and what the call gives
follows from its operands' forms, each asked once (:mod:`shardfx.ir.capture.shells`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils._pytree import tree_leaves

from shardfx.ir.capture.shells import Form, Outcomes
from shardfx.ir.ops.traits import OF_MEMORY

aten = torch.ops.aten


class Beyond(Exception):
    """Something that is not written here, and that AOTAutograd may know how to write."""


NOT_HERE = {
    *OF_MEMORY,
    aten.cudnn_batch_norm,
    aten.miopen_batch_norm,
    aten._efficientzerotensor,
}
"""Ops that see how tensors lie in memory, of which shells have no more than strides; those of libraries that write into
running statistics though their schemas do not say so; and zeros that are known to be, of which a product with infinity
is."""
LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""By which the code's ``torch.tensor([1.0, 2.0])`` becomes a tensor of the program."""
TAGS = {torch.Tag.data_dependent_output, torch.Tag.inplace_view}
"""Ops that ask for numbers, or change tensors that are there."""


class CallWriter(TorchDispatchMode):
    """Writes every op that is called to ``graph``, as often as it is called; ``meta`` says what a node is told of where
    it comes from.

    ``constants`` has those that the code makes of numbers, by the name that the graph gets them by.
    """

    def __init__(self, outcomes: Outcomes, table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.meta: dict[str, Any] = {}
        self.constants: dict[str, Tensor] = {}
        self._outcomes, self._table = outcomes, table
        self._nodes: dict[int, fx.Node] = {}
        self._shells: dict[int, Tensor] = {}
        """Of constants."""
        self._alive: list[Tensor] = []
        self._writable: set[int] = set()
        self._viewed: set[int] = set()
        """The tensors that may lie where another one lies."""
        self._written: dict[Any, bool] = {}
        """Of ops, whether they are written as they are."""

    def stand_for(self, tensor: Tensor, node: fx.Node, *, writable: bool = False) -> None:
        """From now on a tensor is what a node gives; one that the program is given may be ``writable``."""
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        if writable:
            self._writable.add(id(tensor))

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that gives a tensor."""
        if id(tensor) not in self._nodes:
            raise Beyond("a tensor that nothing gives")
        return self._nodes[id(tensor)]

    def _lift(self, tensor: Tensor) -> None:
        """Take a tensor that the code makes of numbers for a constant."""
        if isinstance(tensor, FakeTensor) or tensor.requires_grad or id(tensor) in self._shells:
            return
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor
        shell = self._shells[id(tensor)] = self._outcomes.shell(tensor)
        self.stand_for(shell, self._noted(self.graph.get_attr(name)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_written(func, args, kwargs):
            with self:
                made = self._table.get(func, func.decompose)(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func in LIFTS:
            func = aten.lift_fresh_copy.default
            self._lift(args[0])
        changed = self._changed(func, args, kwargs)
        if changed:
            func = self._functional(func, changed)
        (args, kwargs), (of_args, of_kwargs) = self._given((args, kwargs))
        out = self._outcomes.of(func, args, kwargs)
        node = self._noted(self.graph.call_function(func, of_args, of_kwargs))
        if changed and isinstance(out, Tensor):
            self._change(changed[0], out, node)
            return changed[0]
        if func._schema._is_view_op():
            self._viewed.update(id(each) for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor))
        if isinstance(out, Tensor):
            self._result(out, node)
        elif isinstance(out, (list, tuple)):
            node.meta["val"] = out
            behind = len(out) - len(changed)
            for number, each in enumerate(out):
                if isinstance(each, Tensor):
                    item = self._noted(self.graph.call_function(operator.getitem, (node, number)))
                    if number < behind:
                        self._result(each, item)
                    else:
                        self._change(changed[number - behind], each, item)
            return out[:behind]
        elif out is not None:
            raise Beyond(f"{func} gives a {type(out).__name__}")
        return out

    def _is_written(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op is written as it is, and not taken apart: by the table, or as autograd would have."""
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)][:1]
        found = self._written.get((func, len(leaves)))
        if found is None:
            if func.overloadpacket in NOT_HERE or not TAGS.isdisjoint(func.tags):
                raise Beyond(str(func))
            if not func._schema.returns and func is not aten._assert_tensor_metadata.default:
                raise Beyond(f"{func}, which is called for its effect")
            apart = func in self._table or autograd_would_have_decomposed(func, leaves)
            found = self._written[func, len(leaves)] = not apart
        return found

    def _changed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors into which a call writes."""
        if not func._schema.is_mutable:
            return []
        found = []
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            if not isinstance(given, Tensor):
                raise Beyond(f"{func} writes into a {type(given).__name__}")
            if id(given) in self._viewed or (id(given) not in self._writable and not self._made_here(given)):
                raise Beyond(f"{func}: what it writes into is seen elsewhere")
            found.append(given)
        return found

    def _made_here(self, tensor: Tensor) -> bool:
        return id(tensor) in self._nodes and self._nodes[id(tensor)].op == "call_function"

    def _functional(self, func: Any, changed: Sequence[Tensor]) -> Any:
        """The op that gives what another writes: in place of its result, or behind its results."""
        in_place = len(changed) == 1 and func._opname.endswith("_")
        name = func._opname[:-1] if in_place else f"{func._opname}_functional"
        functional = getattr(getattr(aten, name, None), func._overloadname, None)
        if functional is None or func.namespace != "aten" or functional._schema.is_mutable:
            raise Beyond(f"{func}: no op of the same name gives what it writes")
        more = len(functional._schema.returns) - len(func._schema.returns)
        if more != (0 if in_place else len(changed)):
            raise Beyond(f"{func}: {functional} gives something else")
        return functional

    def _change(self, changed: Tensor, made: Tensor, node: fx.Node) -> None:
        """From now on a tensor is what was written into it."""
        if Form.of(made) != Form.of(changed):
            raise Beyond(f"{node.target} in place, in another form")
        self.stand_for(changed, node)

    def _given(self, arg: Any) -> tuple[Any, Any]:
        """Arguments with shells in place of constants, and with nodes in place of tensors."""
        if isinstance(arg, Tensor):
            shell = self._shells.get(id(arg), arg)
            return shell, self.node_of(shell)
        if isinstance(arg, (list, tuple)):
            both = [self._given(each) for each in arg]
            kind = list if isinstance(arg, list) else tuple
            return kind([shell for shell, _ in both]), kind([node for _, node in both])
        if isinstance(arg, dict):
            found = {name: self._given(each) for name, each in arg.items()}
            return {n: each[0] for n, each in found.items()}, {n: each[1] for n, each in found.items()}
        return arg, arg

    def _result(self, tensor: Tensor, node: fx.Node) -> None:
        if tensor.is_complex():
            raise Beyond("complex numbers, which may be conjugated where they lie")
        if not all(type(size) is int for size in tensor.shape):
            raise Beyond("a shape that the data decide")
        self.stand_for(tensor, node)

    def _noted(self, node: fx.Node) -> fx.Node:
        node.meta.update(self.meta)
        return node
