"""Damage to what only some plans have: places in one memory, rows of a halo, messages, iterations, fused updates,
masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardfx as sx
from shardfx.ir.ops.experts.routed_product import routed_mm
from shardfx.ir.registry import PROGRAM_OPS
from shardfx.passes.rank import Arena

F64 = torch.float64
LAST = 1
"""The rank on which damage is done alone."""
Arguments = tuple[Any, ...]


class Block(nn.Module):
    """Norm, two products, dropout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Image(nn.Module):
    """Convolutions whose rows reach over the border."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 5, padding=2), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.far(F.relu(self.near(x)))).mean((2, 3)))


class Attention(nn.Module):
    """Causal attention, four heads of queries and two of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 32), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.qkv(x).split([16, 8, 8], -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2)).mean(1)


class WrittenAttention(Attention):
    """The same written out, with a soft cap and sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.qkv(x).split([16, 8, 8], -1))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        scores = torch.tanh(q @ k.mT / 4) * 2 + torch.full((8, 8), -torch.inf, dtype=F64).triu(1)
        joined = torch.cat([scores, self.sinks[:, None, None].expand(x.shape[0], -1, x.shape[1], 1)], -1)
        return self.out((joined.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)).mean(1)


class Experts(nn.Module):
    """Two products with the matrices of four experts, of which each row has two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(8, 4), nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        rows = routed_mm(routed_mm(x[:, None], self.up, ids).relu(), self.down, ids)
        return self.head((rows * weights[..., None]).sum(1))


CONTEXTS = {"heads": "all-to-all", "query rows": "gather", "ring": "ring"}
"""The strategies of attention, by the plan."""


@cache
def plan(name: str) -> sx.ParallelModule:
    """A small plan that has what is damaged."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 8, dtype=F64), torch.randint(4, (8,))
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW, "specs": {"args.0": "dp, -", "targets.0": "dp"}}
    mesh, model = sx.Mesh(dp=2), nn.Sequential(Block(0.3 if name == "masks" else 0.0), nn.Linear(8, 4)).double()
    if name == "arena":
        model = nn.Sequential(Block(), Block(), nn.Linear(8, 4)).double()
        given |= {"zero": 3, "zero_min_numel": 8, "rank_passes": [Arena(least=16)]}
    elif name == "iterations":
        given |= {"grad_accumulation": 4}
    elif name == "stages":
        mesh, model = sx.Mesh(pp=2, mb=sx.Loop(2)), nn.Sequential(Block(), Block(), nn.Linear(8, 4)).double()
        given |= {"specs": {"args.0": "mb, -", "targets.0": "mb"}, "pipeline": sx.Pipeline(), "optimizer": None}
    elif name == "rows":
        mesh, model, x = sx.Mesh(h=2), Image().double(), torch.randn(2, 2, 16, 6, dtype=F64)
        y, given = torch.randint(4, (2,)), {"specs": {"args.0": "-, -, h, -"}}
    elif name in CONTEXTS:
        mesh, model, x = sx.Mesh(cp=4), Attention().double(), torch.randn(2, 8, 8, dtype=F64)
        how = CONTEXTS[name]
        y, given = torch.randint(4, (2,)), {"specs": {"args.0": "-, cp, -", "": sx.Context("cp", how)}}
    elif name == "sinks":
        mesh, model, x = sx.Mesh(cp=2), WrittenAttention().double(), torch.randn(2, 8, 8, dtype=F64)
        y, given = torch.randint(4, (2,)), {"specs": {"args.0": "-, cp, -", "": sx.Context("cp", "all-to-all")}}
    elif name == "experts":
        mesh, model = sx.Mesh(ep=2), Experts().double()
        given |= {"specs": {"args.0": "ep, -", "targets.0": "ep", "up": "ep, -, -", "down": "ep, -, -"}}
    hints = sx.Hints(args=(x,), targets=(y,), loss=F.cross_entropy, **given)
    return sx.parallelize(model, mesh, hints, virtual=True)


class Damage(NamedTuple):
    plan: str
    call: str
    change: Callable[[Arguments], Arguments]
    at: int = -1
    """Which of the calls, in the order of the program and of its units."""
    keyword: str = ""
    """The argument that is changed, where it is given by its name."""


def put(place: int, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    """Another argument at a place."""
    return lambda args: (*args[:place], change(args[place]), *args[place + 1 :])


def exchanged(place: int, a: int = 0, b: int = 1) -> Callable[[Arguments], Arguments]:
    """Two entries of a list change places."""

    def change(given: Any) -> list[Any]:
        made = list(given)
        made[a], made[b] = made[b], made[a]
        return made

    return put(place, change)


def other_result(number: int) -> Callable[[Any], Any]:
    """Another result of the call whose result is given."""
    return lambda given: next(user for user in given.args[0].users if user.args[1] == number)


def further(rows: Any) -> Any:
    """The first segment of rows begins and ends one row before."""
    return [further(rows[0]), *rows[1:]] if isinstance(rows[0], list) else [each - 1 for each in rows]


further_block = put(0, lambda place: [place[0], (place[1] + 1) % place[0], *place[2:]])
"""A rank's first block is the next one's."""


def first_step(result: fx.Node) -> fx.Node:
    """The result of the first step, or its logsumexp."""
    while len(result.args) == 1:
        result = result.args[0]
    step, which = result.args
    while "out" in step.kwargs:
        step = step.kwargs["out"]
        while len(step.args) < 3:
            step = step.args[0]
    return next(user for user in step.users if user.args[1:] == (which,))


def exchanged_states(run: Any) -> Any:
    """The second and the third list of a fused kernel's call stand in each other's place."""
    head, first, second, rest = run[-1].split("], [", 3)
    return [*run[:-1], "], [".join((head, second, first, rest))]


FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
STEP, STEP_BACKWARD = "shardfx.attention_step", "shardfx.attention_step_backward"
FIRST_ROW = put(0, lambda box: [*box[:2], box[2] + 1, *box[3:]])
DAMAGES: dict[str, Damage] = {
    "a place where another one lies": Damage("arena", "memory.slot", put(1, lambda at: 0), 6),
    "a place beyond the arena": Damage("arena", "memory.slot", put(1, lambda at: at + (1 << 20))),
    "what is gathered is spread otherwise": Damage("arena", "memory.spread", put(3, lambda ranks: 1), 0),
    "shards that are gathered in another order": Damage("arena", "memory.adjoin", exchanged(0, 0, -1), 0),
    "gradients scattered at other offsets": Damage("arena", "memory.part", put(2, lambda at: at // 2)),
    "a column of a fused update is another's": Damage("iterations", "update.segment", exchanged(3, 1, 5)),
    "another number in a fused update": Damage(
        "iterations", "update.segment", put(0, lambda calls: [each.replace("0.999", "0.99") for each in calls])
    ),
    "another number in a fused kernel": Damage(
        "iterations", "update.segment", put(5, lambda run: [each.replace("beta2=0.999", "beta2=0.99") for each in run])
    ),
    "states of a fused kernel are exchanged": Damage("iterations", "update.segment", put(5, exchanged_states)),
    "rows of an iteration from elsewhere": Damage("iterations", "loop.index", put(1, lambda at: at + 1)),
    "an iteration's rows overlap": Damage("iterations", "loop.index", put(2, lambda by: by - 1)),
    "a sum that begins at one": Damage("iterations", "memory.filled", put(1, lambda start: 1.0)),
    "a product the other way round": Damage("iterations", "loop.addmm", lambda args: (args[0], *args[:0:-1])),
    "a message of another number": Damage("stages", "stage.send", put(2, lambda number: number + 1)),
    "a message that is waited for under another number": Damage(
        "stages", "stage.receive", put(4, lambda number: number + 1)
    ),
    "rows of a halo that begin elsewhere": Damage("rows", "pack.pack_rows", put(2, further), 0),
    "rows of a halo put elsewhere": Damage("rows", "pack.unpack_rows", put(4, lambda at: at[::-1]), 0),
    "a sharding of rows that begins elsewhere": Damage("rows", "pack.take", put(3, lambda start: start + 1), 0),
    "shards of nothing": Damage("masks", "pack.unflatten", put(2, lambda shards: 0)),
    "masks of another number": Damage("masks", "shardfx.dropout", put(3, lambda number: number + 1)),
    "masks of another box": Damage("masks", "shardfx.dropout", put(4, lambda box: [box[0] + 1, *box[1:]])),
    "attention to the future": Damage("heads", FLASH, put(4, lambda causal: not causal)),
    "gradients of attention to the future": Damage("heads", FLASH_BACKWARD, put(7, lambda causal: not causal)),
    "keys in the place of values": Damage("heads", FLASH, lambda args: (*args[:2], args[1], *args[3:])),
    "values in the place of keys": Damage("heads", FLASH_BACKWARD, lambda args: (*args[:2], args[3], *args[3:])),
    "a result in the place of its gradient": Damage("heads", FLASH_BACKWARD, lambda args: (args[4], *args[1:])),
    "heads added up in the place of their copies": Damage("heads", "aten.sum.dim_IntList", put(1, lambda _: [1]), -1),
    "rows that see one key more": Damage("query rows", "shardfx.attention", FIRST_ROW, keyword="box"),
    "gradients of rows that see one key less": Damage(
        "query rows", "shardfx.attention_backward", put(0, lambda box: [*box[:2], box[2] - 1, *box[3:]]), keyword="box"
    ),
    "rows that see nothing of the past": Damage(
        "query rows", "shardfx.attention", put(0, lambda box: [*box[:2], 0, *box[3:]]), keyword="box"
    ),
    "rows attend without a mask": Damage("query rows", "shardfx.attention", put(4, lambda causal: not causal)),
    "a step sees keys of another block": Damage("ring", STEP, put(0, lambda shift: shift - 1), keyword="shift"),
    "a step of another rank's queries": Damage("ring", STEP, further_block, keyword="place"),
    "a step that sees the future": Damage("ring", STEP, put(4, lambda causal: not causal)),
    "a step joined with the first one alone": Damage("ring", STEP, put(0, first_step), keyword="out"),
    "steps without rescaling": Damage("ring", STEP, put(0, first_step), keyword="logsumexp"),
    "gradients of keys of another block": Damage("ring", STEP_BACKWARD, further_block, keyword="place"),
    "another soft cap": Damage("sinks", "shardfx.attention", put(0, lambda cap: cap + 1), keyword="softcap"),
    "gradients without a soft cap": Damage(
        "sinks", "shardfx.attention_backward", put(0, lambda cap: 0.0), keyword="softcap"
    ),
    "no sinks": Damage("sinks", "shardfx.attention", put(0, lambda sinks: None), keyword="sinks"),
    "sinks of other heads": Damage("sinks", "pack.take", put(3, lambda start: abs(start - 2))),
    "gradients of no sinks": Damage("sinks", "shardfx.attention_backward", put(0, lambda sinks: None), keyword="sinks"),
    "rows for experts of another number": Damage("experts", "shardfx.expert_slots", put(1, lambda count: count - 2)),
    "rows sorted for another room": Damage("experts", "shardfx.expert_rows", put(1, lambda room: room - 1)),
    "rows as blocks sent them": Damage("experts", "shardfx.take_rows", put(1, other_result(1)), 1),
    "results by expert sent back": Damage("experts", "shardfx.take_rows", put(1, other_result(0)), 2),
    "matrices of another product": Damage("experts", "shardfx.parts_mm", lambda args: (*args[:1], args[0], *args[2:])),
    "gradients of matrices transposed": Damage(
        "experts", "shardfx.parts_outer", lambda args: (*args[1::-1], *args[2:])
    ),
    "rows without room that are not counted": Damage("experts", "aten.clamp", put(1, lambda least: least + 1), 0),
    "masks drawn for more": Damage("masks", "shardfx.dropout", put(1, lambda p: p + 0.1)),
}
"""What may be wrong with what only some plans have."""


def calls(module: fx.GraphModule, name: str) -> list[fx.Node]:
    """The calls of an op in a program and its units."""
    folder, op, *overload = name.split(".")
    row = PROGRAM_OPS.get(name)
    wanted = row.function if row else getattr(getattr(getattr(torch.ops, folder), op), *(overload or ["default"]))
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.target is wanted]


def damaged(name: str, alone: bool) -> dict[int, fx.GraphModule]:
    """The modules of some ranks, with damage; none where there is no place for it."""
    given = DAMAGES[name]
    pm, found = plan(given.plan), {}
    for rank in [LAST] if alone else range(pm.mesh.size):
        module = pm.rank_module(rank)
        nodes = calls(module, given.call)
        if nodes:
            node = nodes[given.at]
            if given.keyword:
                node.kwargs = {**node.kwargs, given.keyword: given.change((node.kwargs[given.keyword],))[0]}
            else:
                node.args = given.change(node.args)
            node.graph.owning_module.recompile()  # type: ignore[union-attr]
            found[rank] = module
    return found
