"""Hand-made graphs to be drawn: a decoder with forward, backward and communication, of any depth."""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Phase, Value, Where
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.comm import all_gather, all_reduce, reduce_scatter
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.spec import Spec, TensorType

aten = torch.ops.aten
DIM, HIDDEN, ROWS = 64, 256, 32


class Sketch:
    """A graph in the making."""

    def __init__(self, **axes: int) -> None:
        self.mesh = Mesh(**(axes or {"dp": 2, "tp": 4}))
        self.graph = Graph(self.mesh)
        self.phase = Phase.FORWARD

    def spec(self, shape: tuple[int, ...], text: str) -> Spec:
        """``"dp, - +tp"``: the axes of each dim, then those that it is partial over."""
        dims, _, partial = text.partition("+")
        found = Spec.parse(dims.strip(), self.mesh, len(shape))
        return Spec(found.dims, tuple((axis, "sum") for axis in partial.split()))

    def input(self, kind: InputKind, name: str, shape: tuple[int, ...], spec: str) -> Value:
        value = Value(TensorType(shape, torch.float32), name=name, spec=self.spec(shape, spec))
        self.graph.inputs.append(Input(kind, name, value))
        return value

    def parameter(self, name: str, shape: tuple[int, ...], spec: str) -> Value:
        return self.input(InputKind.PARAMETER, name, shape, spec)

    def op(
        self,
        op: Any,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        spec: str,
        module: str,
        why: str = "",
        **kwargs: Any,
    ) -> Value:
        where = Where(module, "/home/user/model.py", 7 + len(self.graph.nodes) % 90, f"y = {str(op).split('.')[1]}(x)")
        node = Node(op, args, kwargs, phase=self.phase, where=where, why=why)
        value = Value(TensorType(shape, torch.float32), node, 0, str(len(self.graph.nodes)), self.spec(shape, spec))
        node.results = [value]
        self.graph.nodes.append(node)
        return value

    def comm(self, op: OwnOp, value: Value, axes: str, spec: str, module: str, **kwargs: Any) -> Value:
        why = f"{value} lies otherwise than it is needed"
        return self.op(op, (value,), value.shape, spec, module, why, axes=axes.split(), **kwargs)

    def output(self, kind: OutputKind, name: str, value: Value) -> None:
        self.graph.outputs.append(Output(kind, name, value))


def mlp() -> Graph:
    """Two linear layers, sharded as Megatron-LM does, forward only."""
    s = Sketch(dp=2, tp=4)
    x = s.input(InputKind.ARGUMENT, "args.0", (ROWS, DIM), "dp, -")
    w1 = s.parameter("up.weight", (DIM, HIDDEN), "-, tp")
    w2 = s.parameter("down.weight", (HIDDEN, DIM), "tp, -")
    h = s.op(aten.mm.default, (x, w1), (ROWS, HIDDEN), "dp, tp", "up", why="hint on 'up.weight'")
    h = s.op(aten.relu.default, (h,), (ROWS, HIDDEN), "dp, tp", "")
    y = s.op(aten.mm.default, (h, w2), (ROWS, DIM), "dp, - + tp", "down")
    y = s.comm(all_reduce, y, "tp", "dp, -", "down", reduce="sum")
    s.output(OutputKind.RESULT, "results.0", y)
    return s.graph


def decoder(layers: int, *, pointwise: int = 24, equal: bool = True) -> Graph:
    """A decoder of ``layers`` blocks with forward and backward.

    Args:
        pointwise: how many ops a norm, and an attention, is made of.
        equal: whether all blocks have the same shapes.
    """
    s = Sketch(dp=2, tp=4)
    x = s.input(InputKind.ARGUMENT, "args.0", (ROWS, DIM), "dp, -")
    kept: list[tuple[str, dict[str, Value]]] = []
    for layer in range(layers):
        hidden = HIDDEN if equal else HIDDEN + 8 * layer
        path = f"layers.{layer}"
        weight = {
            "wqkv": s.parameter(f"{path}.attn.wqkv.weight", (DIM, 3 * DIM), "dp, tp"),
            "wo": s.parameter(f"{path}.attn.wo.weight", (DIM, DIM), "tp, -"),
            "up": s.parameter(f"{path}.mlp.up.weight", (DIM, hidden), "-, tp"),
            "down": s.parameter(f"{path}.mlp.down.weight", (hidden, DIM), "tp, -"),
        }
        n = x
        for _ in range(pointwise):
            n = s.op(aten.mul.Tensor, (n, 2.0), (ROWS, DIM), "dp, -", f"{path}.norm")
        whole = s.comm(all_gather, weight["wqkv"], "dp", "-, tp", f"{path}.attn.wqkv", dim=0)
        q = s.op(aten.mm.default, (n, whole), (ROWS, 3 * DIM), "dp, tp", f"{path}.attn.wqkv", why="hint on wqkv.weight")
        for _ in range(pointwise):
            q = s.op(aten.mul.Tensor, (q, 2.0), (ROWS, DIM), "dp, tp", f"{path}.attn")
        o = s.op(aten.mm.default, (q, weight["wo"]), (ROWS, DIM), "dp, - + tp", f"{path}.attn.wo")
        o = s.comm(all_reduce, o, "tp", "dp, -", f"{path}.attn.wo", reduce="sum")
        x1 = s.op(aten.add.Tensor, (x, o), (ROWS, DIM), "dp, -", path)
        u = s.op(aten.mm.default, (x1, weight["up"]), (ROWS, hidden), "dp, tp", f"{path}.mlp.up")
        g = s.op(aten.gelu.default, (u,), (ROWS, hidden), "dp, tp", f"{path}.mlp")
        d = s.op(aten.mm.default, (g, weight["down"]), (ROWS, DIM), "dp, - + tp", f"{path}.mlp.down")
        d = s.comm(all_reduce, d, "tp", "dp, -", f"{path}.mlp.down", reduce="sum")
        kept.append((path, {**weight, "whole": whole, "x": x, "x1": x1, "u": u, "g": g, "q": q, "n": n}))
        x = s.op(aten.add.Tensor, (x1, d), (ROWS, DIM), "dp, -", path)
    loss = s.op(aten.sum.default, (x,), (), "+ dp", "")
    loss = s.comm(all_reduce, loss, "dp", "", "", reduce="sum")
    s.output(OutputKind.LOSS, "loss", loss)
    _backward(s, kept, pointwise)
    return s.graph


def _backward(s: Sketch, kept: list[tuple[str, dict[str, Value]]], pointwise: int) -> None:
    s.phase = Phase.BACKWARD
    grad = s.op(aten.full.default, ((ROWS, DIM), 1.0), (ROWS, DIM), "dp, -", "")

    def weight_grad(left: Value, right: Value, weight: Value, spec: str) -> None:
        module = weight.name.removesuffix(".weight")
        wide = s.op(aten.mm.default, (left, right), weight.shape, f"{spec} + dp", module)
        if weight.spec is not None and weight.spec.dims[0] == DimSharding(("dp",)):
            given = s.comm(reduce_scatter, wide, "dp", f"dp{spec.removeprefix('-')}", module, dim=0, reduce="sum")
        else:
            given = s.comm(all_reduce, wide, "dp", spec, module, reduce="sum")
        s.output(OutputKind.GRADIENT, weight.name, given)

    for path, v in reversed(kept):
        hidden = v["u"].shape[1]
        weight_grad(v["g"], grad, v["down"], "tp, -")
        dg = s.op(aten.mm.default, (grad, v["down"]), (ROWS, hidden), "dp, tp", f"{path}.mlp.down")
        du = s.op(aten.gelu_backward.default, (dg, v["u"]), (ROWS, hidden), "dp, tp", f"{path}.mlp")
        weight_grad(v["x1"], du, v["up"], "-, tp")
        dx = s.op(aten.mm.default, (du, v["up"]), (ROWS, DIM), "dp, - + tp", f"{path}.mlp.up")
        dx = s.comm(all_reduce, dx, "tp", "dp, -", f"{path}.mlp.up", reduce="sum")
        grad = s.op(aten.add.Tensor, (grad, dx), (ROWS, DIM), "dp, -", "")
        weight_grad(v["q"], grad, v["wo"], "tp, -")
        dq = s.op(aten.mm.default, (grad, v["wo"]), (ROWS, 3 * DIM), "dp, tp", f"{path}.attn.wo")
        for _ in range(pointwise):
            dq = s.op(aten.mul.Tensor, (dq, 2.0), (ROWS, 3 * DIM), "dp, tp", f"{path}.attn")
        weight_grad(v["n"], dq, v["wqkv"], "-, tp")
        dn = s.op(aten.mm.default, (dq, v["whole"]), (ROWS, DIM), "dp, - + tp", f"{path}.attn.wqkv")
        dn = s.comm(all_reduce, dn, "tp", "dp, -", f"{path}.attn.wqkv", reduce="sum")
        for _ in range(pointwise):
            dn = s.op(aten.mul.Tensor, (dn, v["x"]), (ROWS, DIM), "dp, -", f"{path}.norm")
        grad = s.op(aten.add.Tensor, (grad, dn), (ROWS, DIM), "dp, -", "")
