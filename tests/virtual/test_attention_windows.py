"""Attention to a window of keys: no mask, on any mesh, and its rows sharded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import Graph
from shardfx.ir.ops.comm import halo, rows_sent
from tests.reference import check_step

F64 = torch.float64
HEADS, GROUPS, HEAD, DIM = 4, 2, 6, 14


class Windowed(nn.Module):
    """Self-attention of four query heads with two key heads, to a window of keys by a mask."""

    def __init__(self, left: int, right: int, p: float = 0.0) -> None:
        super().__init__()
        self.left, self.right, self.p = left, right, p
        self.q = nn.Linear(DIM, HEADS * HEAD, dtype=F64)
        self.k, self.v = (nn.Linear(DIM, GROUPS * HEAD, dtype=F64) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD, DIM, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        rows, columns = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        mask = (columns >= rows - self.left) & (columns <= rows + self.right)
        out = F.scaled_dot_product_attention(q, k, v, mask, self.p, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


WEIGHTS = {"q.weight": "tp, -", "k.weight": "tp, -", "v.weight": "tp, -", "out.weight": "-, tp"}
SEQUENCE = {"args.0": "-, cp, -"}


def largest(graph: Graph, length: int) -> int:
    """The number of elements of the largest value with two dims as long as the sequence; 0 without any."""
    values = [*(each.value for each in graph.inputs), *(value for node in graph.nodes for value in node.outs)]
    shapes = [each.shape for each in values if sum(size == length for size in each.shape) > 1]
    return max(map(math.prod, shapes), default=0)


@pytest.mark.parametrize(("left", "right"), [(3, 0), (2, 2)])
@pytest.mark.parametrize(
    ("mesh", "length", "specs"),
    [
        (sx.Mesh(dp=2), 11, {"args.0": "dp, -, -"}),
        (sx.Mesh(tp=2), 11, WEIGHTS),
        (sx.Mesh(cp=2), 16, SEQUENCE),
        (sx.Mesh(cp=3), 13, SEQUENCE),
        (sx.Mesh(cp=2, tp=2), 11, {**SEQUENCE, **WEIGHTS}),
    ],
    ids=str,
)
def test_window_attention_matches_single_device(
    mesh: sx.Mesh, length: int, specs: dict[str, str], left: int, right: int
) -> None:
    torch.manual_seed(0)
    model, x = Windowed(left, right), torch.randn(2, length, DIM, dtype=F64)
    pm = sx.parallelize(model, mesh, sx.Hints(args=(x,), loss=squares, specs=specs), virtual=True)
    check_step(pm, model, squares, (x,), bound=1e-12)
    assert pm.verify()
    assert largest(pm.captured, length) == largest(pm.planned, length) == 0


def by_rows(ranks: int, length: int, left: int, right: int = 0, **options: Any) -> tuple[sx.ParallelModule, nn.Module]:
    torch.manual_seed(0)
    model = Windowed(left, right, **options)
    hints = sx.Hints(args=(torch.randn(2, length, DIM, dtype=F64),), loss=squares, specs=SEQUENCE)
    return sx.parallelize(model, sx.Mesh(cp=ranks), hints, virtual=True), model


def exchanged(pm: sx.ParallelModule) -> float:
    """The bytes that the busiest rank sends of rows of halos; no other move has the rows of the sequence."""
    nodes = [node for node in pm.planned.nodes if str(node.op).startswith("comm.")]
    assert {str(node.op) for node in nodes} == {"comm.halo", "comm.all_reduce"}
    return sum(rows_sent(node, pm.planned.mesh) for node in nodes if node.op is halo)


def test_window_exchanges_a_halo_however_many_ranks() -> None:
    sent = {exchanged(by_rows(ranks, 10 * ranks, 3)[0]) for ranks in (3, 5)}
    assert len(sent) == 1 and 0 < sent.pop() < 20_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "length", "left", "right"),
    [
        (4, 6, 1, 0),  # one rank has no row
        (5, 13, 5, 0),  # of more rows than a rank has
        (3, 13, 2, 3),
        (2, 11, 9, 0),  # of which a halo would be most rows: keys are gathered
        (3, 13, 0, 0),  # no halo
        (2, 11, 6, -1),
    ],
)
def test_window_by_rows_matches_single_device(ranks: int, length: int, left: int, right: int) -> None:
    pm, model = by_rows(ranks, length, left, right)
    check_step(pm, model, squares, (torch.randn(2, length, DIM, dtype=F64),), bound=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_window_with_dropout_draws_as_one_device(ranks: int) -> None:
    model, x = Windowed(3, 0, 0.5).train(), torch.randn(2, 13, DIM, dtype=F64)
    found = []
    for mesh in (sx.Mesh(cp=1), sx.Mesh(cp=ranks)):
        pm = sx.parallelize(model, mesh, sx.Hints(args=(x,), loss=squares, specs=SEQUENCE), virtual=True)
        torch.manual_seed(1)
        loss = pm(x)
        loss.backward()
        found.append((loss.detach(), pm.full_grads()))
        assert pm.verify()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("how", "factor"), [("gather", "s"), ("all-to-all", "h")])
def test_window_in_context_parallelism(how: str, factor: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Windowed(3, 0)), torch.randn(2, 13, DIM, dtype=F64)
    hints = sx.Hints(args=(x,), loss=squares, specs={**SEQUENCE, "0": sx.Context("cp", how=how)})
    pm = sx.parallelize(model, sx.Mesh(cp=2), hints, virtual=True)
    check_step(pm, model, squares, (x,), bound=1e-12)
    attends = [node.strategy for node in pm.planned.nodes if "attention" in str(node.op)]
    assert [each.shardings for each in attends if each is not None] == [((factor, ("cp",)),)] * 2


@pytest.mark.parametrize("change", [{"box": [0, 0, 5, 1]}, {"rows": [4, 5]}, {"window": [2, 0]}, {"window": [4, 0]}])
def test_window_of_other_places_is_refuted(change: dict[str, list[int]]) -> None:
    pm, _ = by_rows(3, 13, 3)
    module = pm.rank_module(1)
    (node,) = (node for node in module.graph.nodes if str(node.target) == "shardfx.attention_backward.default")
    assert (node.kwargs["box"], node.kwargs["rows"]) == ([0, 0, 5, 2], [5, 5])
    node.kwargs = {**node.kwargs, **change}
    assert pm.verify(modules={1: module}).status == "refuted"


def test_window_at_scale_is_executed_small() -> None:
    """Its rule is not assumed."""

    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            places = torch.arange(q.shape[2])
            mask = (places <= places[:, None]) & (places > places[:, None] - 1024)
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    q, k = (torch.empty(2, heads, 16384, 128, device="meta", requires_grad=True) for heads in (16, 4))
    specs = dict.fromkeys(("args.0", "args.1", "args.2"), "-, -, cp, -")
    pm = sx.parallelize(Attend(), sx.Mesh(cp=8), sx.Hints(args=(q, k, k.clone()), loss=squares, specs=specs))
    verdict = pm.verify()
    assert verdict and exchanged(pm)
    assert not [each for each in verdict.assumptions if "attention" in each]


def decoder(name: str) -> nn.Module:
    """A decoder of two layers, each with a window of four keys, or (Gemma3) one with and one without."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    if name == "mistral":
        config = transformers.MistralConfig(sliding_window=4, use_cache=False, **sizes)
        made = transformers.MistralForCausalLM(config)
    elif name == "modernbert":
        sizes = {name: n for name, n in sizes.items() if "key_value" not in name}
        config = transformers.ModernBertConfig(local_attention=6, global_attn_every_n_layers=2, **sizes)
        made = transformers.ModernBertForMaskedLM(config)
    else:
        layers = ["sliding_attention", "full_attention"]
        config = transformers.Gemma3TextConfig(
            sliding_window=4, layer_types=layers, head_dim=8, use_cache=False, **sizes
        )
        made = transformers.Gemma3ForCausalLM(config)
        for name, norm in [*made.named_modules()]:
            if name.endswith("norm"):  # their own compute in float32
                made.set_submodule(name, nn.RMSNorm(norm.weight.shape, norm.eps))
    return made.double().train()


def logits(out: Any) -> Tensor:
    return out.logits.square().mean()


PROJECTIONS = {f"model.layers.*.self_attn.{name}_proj.weight": "tp, -" for name in "qkv"}
PROJECTIONS |= {"model.layers.*.self_attn.o_proj.weight": "-, tp"}
OF_DECODERS = {"mistral": ["3 0", "3 0"], "gemma3": ["3 0", ""], "modernbert": ["", "3 3"]}


@pytest.mark.long
@pytest.mark.parametrize("name", OF_DECODERS)
@pytest.mark.parametrize(
    ("mesh", "length", "specs"),
    [
        (sx.Mesh(dp=2), 11, {"args.0": "dp, -"}),
        (sx.Mesh(tp=2), 11, PROJECTIONS),
        (sx.Mesh(cp=2), 22, {"args.0": "-, cp"}),
        (sx.Mesh(cp=3), 13, {"args.0": "-, cp"}),
    ],
    ids=str,
)
def test_decoder_with_windows_matches_single_device(
    name: str, mesh: sx.Mesh, length: int, specs: dict[str, str]
) -> None:
    model, ids = decoder(name), torch.randint(1, 48, (2, length))
    specs = specs if name != "modernbert" or "args.0" in specs else {}
    pm = sx.parallelize(model, mesh, sx.Hints(args=(ids,), loss=logits, specs=specs), virtual=True)
    check_step(pm, model, logits, (ids,), bound=1e-12)
    attends = [node for node in pm.captured.nodes if str(node.op) == "shardfx.attention.default"]
    assert [" ".join(map(str, node.kwargs.get("window", ()))) for node in attends] == OF_DECODERS[name]
    assert all(node.args[3:4] in ((), (None,)) for node in attends)
    assert largest(pm.captured, length) == largest(pm.planned, length) == 0


class Packed(Windowed):
    """Causal self-attention to the tokens of a query's own document that are kept."""

    def forward(self, x: Tensor, docs: Tensor, kept: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        rows, columns = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        mask = (columns <= rows) & (docs[:, None, :, None] == docs[:, None, None]) & kept[:, None, None]
        mask = mask & (columns >= rows - self.left)
        out = F.scaled_dot_product_attention(q, k, v, mask, self.p, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


TOKENS = {f"args.{i}": "-, cp" for i in (1, 2)}


@pytest.mark.parametrize("left", [3, 99])
@pytest.mark.parametrize(
    ("mesh", "length", "specs"),
    [
        (sx.Mesh(dp=2), 11, {"args.0": "dp, -, -", "args.1": "dp, -", "args.2": "dp, -"}),
        (sx.Mesh(tp=2), 11, WEIGHTS),
        (sx.Mesh(cp=2), 16, {**SEQUENCE, **TOKENS}),
        (sx.Mesh(cp=3), 13, {**SEQUENCE, **TOKENS}),
    ],
    ids=str,
)
def test_packed_documents_match_single_device(mesh: sx.Mesh, length: int, specs: dict[str, str], left: int) -> None:
    torch.manual_seed(0)
    model, x = Packed(left, 0), torch.randn(2, length, DIM, dtype=F64)
    docs, kept = torch.randint(0, 3, (2, length)).sort(1).values, torch.rand(2, length) > 0.2
    pm = sx.parallelize(model, mesh, sx.Hints(args=(x, docs, kept), loss=squares, specs=specs), virtual=True)
    check_step(pm, model, squares, (x, docs, kept), bound=1e-12)
    assert largest(pm.captured, length) == largest(pm.planned, length) == 0
    torch.testing.assert_close(pm(x, docs.flip(0), kept.flip(0)), squares(model(x, docs.flip(0), kept.flip(0))))


@pytest.mark.long
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize(
    ("mesh", "length", "specs"), [(sx.Mesh(tp=2), 11, PROJECTIONS), (sx.Mesh(cp=3), 13, {"args.*": "-, cp"})], ids=str
)
def test_decoder_with_padding_matches_single_device(
    name: str, mesh: sx.Mesh, length: int, specs: dict[str, str]
) -> None:
    model, ids, kept = decoder(name), torch.randint(1, 48, (2, length)), torch.ones(2, length, dtype=torch.int64)
    kept[0, :3] = kept[1, -2:] = 0
    pm = sx.parallelize(model, mesh, sx.Hints(args=(ids, kept), loss=logits, specs=specs), virtual=True)
    check_step(pm, model, logits, (ids, kept), bound=1e-12)
    assert all("q_ids" in node.kwargs for node in pm.captured.nodes if str(node.op) == "shardfx.attention.default")
    assert largest(pm.captured, length) == largest(pm.planned, length) == 0
