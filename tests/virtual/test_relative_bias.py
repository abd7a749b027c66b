"""Biases of attention by the distance of a key from its query (ALiBi, T5): on any mesh, by each strategy of context
parallelism, without a value of queries times keys; compared with one device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from benchmarks.context_matrix import in_float64
from shardfx.ir.graph import Node
from shardfx.ir.rules.template import argument
from tests.reference import check_step
from tests.virtual.test_attention_windows import largest, logits

F64 = torch.float64
HEADS, GROUPS, HEAD, DIM = 4, 2, 6, 14


class Biased(nn.Module):
    """Self-attention of four query heads with two key heads, with a bias by distance that a subclass computes."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(DIM, HEADS * HEAD, dtype=F64), nn.Linear(HEADS * HEAD, DIM, dtype=F64)
        self.k, self.v = (nn.Linear(DIM, GROUPS * HEAD, dtype=F64) for _ in range(2))
        self.slopes = nn.Parameter(torch.rand(HEADS, dtype=F64))
        self.table = nn.Embedding(5, HEADS, dtype=F64)

    def bias(self, rows: Tensor, columns: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        mask = self.bias(places[:, None], places[None, :])
        if self.causal:
            mask = mask.masked_fill(places[None, :] > places[:, None], -torch.inf)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Alibi(Biased):
    """Causal, with fixed slopes."""

    causal = True

    def bias(self, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=F64)[:, None, None] * (columns - rows)


class Symmetric(Biased):
    """All keys, with slopes that are trained."""

    def bias(self, rows: Tensor, columns: Tensor) -> Tensor:
        return -(rows - columns).abs()[None, None] * self.slopes.view(1, -1, 1, 1)


class Buckets(Biased):
    """Causal, with a table of numbers that are trained."""

    causal = True

    def bias(self, rows: Tensor, columns: Tensor) -> Tensor:
        far = torch.minimum((rows - columns).clamp(min=0), torch.full((len(rows), len(rows)), 4))
        return self.table(far).permute(2, 0, 1)


class Near(Biased):
    """A window of three keys on each side, with a table, and one number for all heads beside it."""

    def bias(self, rows: Tensor, columns: Tensor) -> Tensor:
        apart = columns - rows
        apart += 3
        return self.table.weight[apart.clamp(0, 4)].movedim(-1, 0).masked_fill((rows - columns).abs() > 3, -torch.inf)


MODELS = (Alibi, Symmetric, Buckets, Near)
ROWS = {"args.0": "-, cp, -"}
WEIGHTS = {"q.weight": "tp, -", "k.weight": "tp, -", "v.weight": "tp, -", "out.weight": "-, tp"}
CASES: dict[str, tuple[sx.Mesh, dict[str, Any], int]] = {
    "dp": (sx.Mesh(dp=2), {"args.0": "dp, -, -"}, 11),
    "tp": (sx.Mesh(tp=2), WEIGHTS, 11),
    "rows": (sx.Mesh(cp=3), ROWS, 13),
    "gather": (sx.Mesh(cp=2), {**ROWS, "": sx.Context("cp", "gather")}, 16),
    "all-to-all": (sx.Mesh(cp=4), {**ROWS, "": sx.Context("cp", "all-to-all")}, 13),
    "ring": (sx.Mesh(cp=3), {**ROWS, "": sx.Context("cp", "ring")}, 15),
    "ring, uneven": (sx.Mesh(cp=3), {**ROWS, "": sx.Context("cp", "ring")}, 13),
    "ring, stripes": (sx.Mesh(cp=2), {**ROWS, "": sx.Context("cp", "ring", stripes=3)}, 18),
    "2d, tp": (sx.Mesh(tp=2, r=2, u=2), {**WEIGHTS, "args.0": "-, r u, -", "": sx.Context("r u", "2d")}, 16),
}


class Mixed(Biased):
    """Beside a table, numbers that are trained for each pair of places, and a mask that is no predicate."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(18, 18, dtype=F64))

    def bias(self, rows: Tensor, columns: Tensor) -> Tensor:
        near = self.table((columns - rows).clamp(-2, 2) + 2).permute(2, 0, 1)
        either = (columns <= rows).logical_or(columns % 3 == 0)
        return (near + self.pairs).masked_fill(~either, -torch.inf)


class MixedBool(Mixed):
    """The same with weights that are written out, and a mask of booleans beside them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        places = torch.arange(x.shape[1])
        apart = places[None, :] - places[:, None]
        either = (apart <= 0).logical_or(places % 3 == 0)
        scores = (q @ k.mT + self.table(apart.clamp(-2, 2) + 2).permute(2, 0, 1)).masked_fill(~either, -torch.inf)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
@pytest.mark.parametrize("kind", [Mixed, MixedBool])
def test_a_relative_bias_beside_a_dense_mask_matches_single_device(kind: type[Mixed]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 18, DIM, dtype=F64)
    pm = sx.parallelize(model, sx.Mesh(cp=2), sx.Hints(args=(x,), loss=squares, specs=ROWS), virtual=True)
    check_step(pm, model, squares, (x,), bound=1e-12)
    (node,) = attentions(pm)
    assert "relative_bias" in node.kwargs and argument(node, "mask").shape[-2:] == (18, 18)
    assert (argument(node, "mask").type.dtype is torch.bool) is (kind is MixedBool)


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def attentions(pm: sx.ParallelModule) -> list[Node]:
    return [node for node in pm.captured.nodes if str(node.op) == "shardfx.attention.default"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_attention_with_a_relative_bias_matches_single_device(kind: type[Biased], case: str) -> None:
    mesh, specs, length = CASES[case]
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, length, DIM, dtype=F64)
    pm = sx.parallelize(model, mesh, sx.Hints(args=(x,), loss=squares, specs=specs), virtual=True)
    check_step(pm, model, squares, (x,), bound=1e-12)
    (node,) = attentions(pm)
    assert node.kwargs["relative_bias"].shape == (HEADS, 2 * length - 1)
    assert [argument(node, "causal"), node.kwargs.get("window")] == [kind.causal, [3, 3] if kind is Near else None]
    assert largest(pm.captured, length) == largest(pm.planned, length) == 0


def moved(node: fx.Node) -> None:
    """The rank's rows one place further."""
    name = "box" if "box" in node.kwargs else "place"
    node.update_kwarg(name, [number + (at in (1, 2)) for at, number in enumerate(node.kwargs[name])])


def flipped(node: fx.Node) -> None:
    bias = node.kwargs["relative_bias"]
    with node.graph.inserting_before(node):
        node.update_kwarg("relative_bias", node.graph.call_function(torch.ops.aten.flip.default, (bias, [1])))


def without(node: fx.Node) -> None:
    node.kwargs = {name: each for name, each in node.kwargs.items() if name != "relative_bias"}


def flat(node: fx.Node) -> None:
    node.update_kwarg("flat", True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
@pytest.mark.parametrize("change", [moved, flipped, without, flat])
@pytest.mark.parametrize("case", ["rows", "ring"])
def test_damaged_attention_with_a_relative_bias_is_refused(case: str, change: Callable[[fx.Node], None]) -> None:
    mesh, specs, length = CASES[case]
    model, x = Buckets(), torch.randn(2, length, DIM, dtype=F64)
    pm = sx.parallelize(model, mesh, sx.Hints(args=(x,), loss=squares, specs=specs), virtual=True)
    assert pm.verify()
    calls = [node.name for node in pm.rank_module(1).graph.nodes if "shardfx.attention" in str(node.target)]
    assert len(calls) == (2 if case == "rows" else 6)
    for name in calls:
        changed = pm.rank_module(1)
        change(next(node for node in changed.graph.nodes if node.name == name))
        changed.recompile()
        assert not pm.verify(modules={1: changed}), name


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
def test_a_gradient_of_a_relative_bias_without_a_step_is_refused() -> None:
    mesh, specs, length = CASES["ring"]
    model, x = Buckets(), torch.randn(2, length, DIM, dtype=F64)
    pm = sx.parallelize(model, mesh, sx.Hints(args=(x,), loss=squares, specs=specs), virtual=True)
    changed = pm.rank_module(1)
    parts = [
        node
        for node in changed.graph.nodes
        if node.target is operator.getitem
        and node.args[1] == 4
        and "attention_step_backward" in str(node.args[0].target)
    ]
    assert len(parts) == 3
    parts[1].replace_all_uses_with(parts[0])
    changed.recompile()
    assert not pm.verify(modules={1: changed})


def hugging_face(name: str) -> nn.Module:
    """A model of transformers: T5 (buckets), or Bloom and MPT (slopes times the places of keys)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=48, d_model=24, d_kv=6, d_ff=20, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
        )
        return in_float64(transformers.T5ForConditionalGeneration(config))
    if name == "bloom":
        config = transformers.BloomConfig(
            vocab_size=48,
            hidden_size=24,
            n_layer=2,
            n_head=4,
            use_cache=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        return in_float64(transformers.BloomForCausalLM(config))
    config = transformers.MptConfig(
        vocab_size=48, d_model=24, n_layers=2, n_heads=4, expansion_ratio=1, max_seq_len=64, use_cache=False
    )
    return in_float64(transformers.MptForCausalLM(config))


FROM_TRANSFORMERS = [
    ("t5", "ring", 1e-12),
    ("t5", "all-to-all", 1e-12),
    ("t5", "gather", 1e-12),
    ("bloom", "all-to-all", 1e-12),
    ("bloom", "gather", 1e-12),
    ("mpt", "all-to-all", 1e-7),  # its softmax is one of float32
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "how", "bound"), FROM_TRANSFORMERS)
def test_a_model_of_transformers_with_biases_by_place_matches_single_device(
    name: str, how: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda x, dim=None, **_: softmax(x, dim))
    model, ids = hugging_face(name), torch.randint(1, 48, (2, 26))
    given = {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if name == "t5" else {})
    modules = (
        ("**.SelfAttention", "**.EncDecAttention")
        if name == "t5"
        else ("**.self_attention" if name == "bloom" else "**.attn",)
    )
    specs: dict[str, Any] = {f"kwargs.{each}": "-, cp" for each in given}
    specs |= {each: sx.Context("cp", how) for each in modules}
    pm = sx.parallelize(model, sx.Mesh(cp=2), sx.Hints(kwargs=given, loss=logits, specs=specs), virtual=True)
    check_step(pm, model, logits, (), kwargs=given, bound=bound)
    assert len(attentions(pm)) == (6 if name == "t5" else 2)
    assert sum("relative_bias" in node.kwargs for node in attentions(pm)) == (4 if name == "t5" else 0)
    assert largest(pm.captured, 26) == largest(pm.planned, 26) == 0
