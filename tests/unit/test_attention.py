"""Attention as one op: its kernels beside torch's attention, what capture keeps, what a device's program calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardfx as sx
from shardfx.ir.capture.graph_interpreter import interpret
from shardfx.ir.capture.trace import capture
from shardfx.ir.cost.flops import FLOPS
from shardfx.ir.graph import Graph, Node, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.context import window_tiles
from shardfx.ir.ops.context.plain_attention import drawn, forward_by_hand
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.program.lower import lower
from shardfx.ir.rulebook import default_rules

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}


def masks(dtype: torch.dtype, s: int, t: int) -> list[Tensor | None]:
    seen = torch.rand(2, 1, s, t) > 0.3
    seen[0, 0, 1] = False  # a query that sees no key
    return [None, torch.randn(s, t, dtype=dtype), seen, torch.randn(1, 4, 1, t, dtype=dtype)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("lengths", [(6, 6), (6, 9), (9, 6)])
@pytest.mark.parametrize("heads", [4, 2, 1])
def test_it_is_torchs_attention_in_float64(
    device: str, dtype: torch.dtype, lengths: tuple[int, int], heads: int
) -> None:
    """Forward, logsumexp and all gradients, that of a mask too. In 16 bits torch's own is wrong in a row that sees no
    key."""
    torch.manual_seed(0)
    s, t = lengths
    for columns, causal, mask, of_mask in itertools.product(
        (8, 5, 11), (False, True), masks(dtype, s, t), (False, True)
    ):
        if (causal and mask is not None) or (of_mask and (mask is None or mask.dtype == torch.bool)):
            continue
        shapes = (2, 4, s, 8), (2, heads, t, 8), (2, heads, t, columns)
        given = [torch.randn(shape, dtype=dtype) for shape in shapes]
        if mask is not None:
            given.append(mask)
        wide = [x.double() if x.is_floating_point() else x for x in given]
        inputs, wide_inputs = ([x.requires_grad_() for x in xs[: 3 + of_mask]] for xs in (given, wide))
        q, k, v, *bias = wide
        options = {"attn_mask": bias[0] if bias else None, "is_causal": causal, "enable_gqa": heads != 4}
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        q, k, v, *bias = (x.to(device) for x in given)
        out, logsumexp = attention(q, k, v, bias[0] if bias else None, causal)
        grad = torch.randn(expected.shape, dtype=dtype)
        ours = torch.autograd.grad(out, inputs, grad.to(device))
        theirs = torch.autograd.grad(expected, wide_inputs, grad.double())
        for a, b in [(out.cpu(), expected), *zip(ours, theirs, strict=True)]:
            assert a.shape == b.shape and a.dtype == dtype
            assert (a - b).abs().max() < CLOSE[dtype]
        with torch.no_grad():
            rows = forward_by_hand(*wide[:3], wide[3] if bias else None, causal, None)[1]
            assert (logsumexp.cpu() - rows).abs().max() < CLOSE[dtype]


def by_softmax(qkv: list[Tensor], bias: Tensor, softcap: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and its logsumexp as a softmax of products, with one more column for the sinks."""
    q, k, v = qkv[0], *(each.repeat_interleave(2, 1) for each in qkv[1:])
    scores = q @ k.mT * 0.5
    scores = (torch.tanh(scores / softcap) * softcap if softcap else scores) + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(2, -1, scores.shape[2], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kind", ["all", "causal", "window", "mask", "rows", "mask and window"])
def test_soft_caps_sinks_and_the_gradient_of_the_logsumexp(
    monkeypatch: pytest.MonkeyPatch, softcap: float, has_sinks: bool, kind: str
) -> None:
    """Those of the result, of the logsumexp, and of both."""
    monkeypatch.setattr(window_tiles, "SMALLEST", 4)
    torch.manual_seed(0)
    qkv = [torch.randn(2, heads, 11, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_sinks else None
    apart = torch.arange(11) - torch.arange(11)[:, None]
    far = (apart > 0) | (apart < -3)
    hidden = {"causal": apart > 0, "window": far, "rows": apart > 3, "mask and window": far}.get(kind, apart > 11)
    bias = torch.randn(1, 4, 11, 11, dtype=torch.float64, requires_grad=True)
    how: dict[str, dict[str, Any]] = {
        "mask": {"mask": bias},
        "causal": {"causal": True},
        "window": {"causal": True, "window": [3, 0]},
        "rows": {"causal": True, "box": [0, 0, 3, 0]},
        "mask and window": {"mask": bias, "causal": True, "window": [3, 0]},
    }
    given = (bias if "mask" in kind else torch.zeros(11, 11, dtype=torch.float64)).masked_fill(hidden, -torch.inf)
    ours = attention(*qkv, scale=0.5, softcap=softcap, sinks=sinks, **how.get(kind, {}))
    theirs = by_softmax(qkv, given, softcap, sinks)
    leaves = [*qkv, *([sinks] if sinks is not None else []), *([bias] if "mask" in kind else [])]
    grads = [torch.randn_like(each) for each in ours]
    for picked in ([0], [1], [0, 1]):
        a, b = (
            torch.autograd.grad(
                [out[i] for i in picked], leaves, [grads[i] for i in picked], retain_graph=True, materialize_grads=True
            )
            for out in (ours, theirs)
        )
        torch.testing.assert_close((*ours, *a), (*theirs, *b), rtol=0, atol=1e-12)


WINDOWS = [(True, [3, 0]), (False, [2, 4]), (False, [30, -2]), (False, [-3, 5]), (True, [20, 20]), (True, [0, 0])]


def in_window(rows: int, keys: int, causal: bool, window: list[int], apart: int = 0) -> Tensor:
    """The mask of a window, of queries that stand ``apart`` places behind the keys."""
    places = torch.arange(keys) - torch.arange(rows)[:, None] - apart
    return (places >= -window[0]) & (places <= (min(window[1], 0) if causal else window[1]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", [4, 128])
@pytest.mark.parametrize(("s", "t", "heads", "columns"), [(13, 13, 2, 8), (13, 9, 4, 8), (9, 13, 1, 5), (5, 0, 2, 8)])
def test_window_is_its_dense_mask(
    monkeypatch: pytest.MonkeyPatch, device: str, tile: int, s: int, t: int, heads: int, columns: int
) -> None:
    """Forward, logsumexp and all gradients, of all rows and of some from a place on."""
    monkeypatch.setattr(window_tiles, "SMALLEST", tile)
    torch.manual_seed(0)
    shapes = (2, 4, s, 8), (2, heads, t, 8), (2, heads, t, columns)
    q, k, v = (torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes)
    for (causal, window), first in itertools.product(WINDOWS, (0, 3)):
        seen = in_window(s, t, causal, window, first).to(device)
        ours = attention(q, k, v, None, causal, box=[0, 0, first, 0], window=window)
        theirs = attention(q, k, v, seen)
        grad = torch.randn_like(ours[0])
        grads = (torch.autograd.grad(out[0], (q, k, v), grad) for out in (ours, theirs))
        for a, b in zip((*ours, *next(grads)), (*theirs, *next(grads)), strict=True):
            assert a.shape == b.shape and torch.allclose(a, b, atol=1e-12, rtol=0)


def test_window_with_dropout_is_its_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shard of rows and heads, too, where each draws what is its own in the whole."""
    monkeypatch.setattr(window_tiles, "SMALLEST", 4)
    q, k, v = (torch.randn(2, h, 11, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    draw = 0.25, torch.tensor(5), 3
    boxes = [], [4, 2, 5, 3], [1, 4, 0, 2, 1, 4, 0, 4, 1, 11, 0, 11, 1, 11, 0, 11]
    for box, causal in itertools.product(boxes, (False, True)):
        apart = box[2] - box[3] if len(box) == 4 else 0
        ours = attention(q, k, v, None, causal, None, *draw, box, [3, 2])[0]
        theirs = attention(q, k, v, in_window(11, 11, causal, [3, 2], apart), False, None, *draw, box)[0]
        grad = torch.randn_like(ours)
        grads = (torch.autograd.grad(out, (q, k, v), grad) for out in (ours, theirs))
        for a, b in zip((ours, *next(grads)), (theirs, *next(grads)), strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("causal", "window"), [(True, []), (False, []), (True, [3, 0]), (False, [2, 4])])
@pytest.mark.parametrize(("s", "t", "heads", "batch"), [(13, 13, 2, 2), (13, 9, 4, 1), (9, 13, 1, 2)])
def test_keys_with_the_id_of_a_query_are_its_dense_mask(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    s: int,
    t: int,
    heads: int,
    batch: int,
    causal: bool,
    window: list[int],
) -> None:
    """Forward, logsumexp and all gradients, with dropout and without; ids are of each sample, or of all."""
    monkeypatch.setattr(window_tiles, "SMALLEST", 4)
    torch.manual_seed(0)
    shapes = (2, 4, s, 8), (2, heads, t, 8), (2, heads, t, 5)
    q, k, v = (torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes)
    q_ids, k_ids = (torch.randint(0, 3, (batch, n), device=device) for n in (s, t))
    seen = in_window(s, t, causal, window or [99, 99]).to(device) & (q_ids[:, None, :, None] == k_ids[:, None, None])
    for p in (0.0, 0.25):
        draw = p, torch.tensor(5, device=device) if p else None, 3
        ours = attention(q, k, v, None, causal, None, *draw, [], window, q_ids, k_ids)
        theirs = attention(q, k, v, seen.expand(2, -1, -1, -1), False, None, *draw)
        grad = torch.randn_like(ours[0])
        grads = (torch.autograd.grad(out[0], (q, k, v), grad) for out in (ours, theirs))
        for a, b in zip((*ours, *next(grads)), (*theirs, *next(grads)), strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=0)


def test_a_mask_beside_ids_hides_further_keys() -> None:
    q, ids = torch.randn(1, 1, 6, 8, dtype=torch.float64), torch.tensor([[0, 0, 1, 1, 1, 2]])
    kept = torch.rand(6, 6) > 0.4
    ours = attention(q, q, q, kept, q_ids=ids, k_ids=ids)
    theirs = attention(q, q, q, kept & (ids[0] == ids[0, :, None]))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("left", "right"), [(3, 0), (2, 4), (0, 0)])
def test_gradients_of_a_shard_in_a_window_are_those_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, left: int, right: int
) -> None:
    """From the queries that see the shard's keys, and the keys that its queries see; FLOPs are of these pairs."""
    monkeypatch.setattr(window_tiles, "SMALLEST", 2)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 13, 8, dtype=torch.float64) for h in (4, 2, 2))
    out, rows = attention(q, k, v, None, False, window=[left, right])
    grad = torch.randn_like(out)
    whole = attention_backward(grad, q, k, v, out, rows, window=[left, right])
    for first, last in ((0, 4), (4, 9), (9, 13), (5, 6)):
        see, seen = (slice(max(first - a, 0), min(last + b, 13)) for a, b in ((right, left), (left, right)))
        part = grad[:, :, see], q[:, :, see], k[:, :, seen], v[:, :, seen], out[:, :, see], rows[:, :, see]
        named = {"box": [0, 0, see.start, seen.start], "window": [left, right], "rows": [first, last - first]}
        grads = attention_backward(*part, **named)
        like = attention_backward(*(each.to("meta") for each in part), **named)
        for ours, shapes, all_rows in zip(grads[:3], like[:3], whole[:3], strict=True):
            assert torch.allclose(ours, all_rows[:, :, first:last], atol=1e-12, rtol=0)
            assert ours.shape == shapes.shape and ours.stride() == shapes.stride()
        pairs = in_window(13, 13, False, [left, right])
        pairs[: see.start] = pairs[see.stop :] = False
        pairs[:first, :first] = pairs[:first, last:] = pairs[last:, :first] = pairs[last:, last:] = False
        assert FLOPS[attention_backward](*part, **named) == 5 * 2 * 2 * 4 * 8 * int(pairs.sum())


def test_window_has_no_value_of_rows_times_keys() -> None:
    """Beside the tensors of the call: those of a tile of 128 rows, and their 128 + 32 keys."""
    q, k, v = (torch.randn(1, 1, 2048, 8, requires_grad=True) for _ in range(3))
    sizes = Largest()
    with sizes:
        attention(q, k, v, None, True, window=[32, 0])[0].sum().backward()
    assert sizes.most < 2 * 128 * (128 + 32)


@pytest.mark.parametrize("columns", [5, 11])
def test_values_of_another_width_have_no_value_of_rows_times_keys(columns: int) -> None:
    """As those of multi-head latent attention (DeepSeek-V3) have: kernels get columns of zeros."""
    q, k, v = (torch.randn(1, 1, 512, n, requires_grad=True) for n in (8, 8, columns))
    sizes = Largest()
    with sizes:
        attention(q, k, v, None, True)[0].sum().backward()
    assert sizes.most <= 512 * 11


class Largest(TorchDispatchMode):
    """The number of elements of the largest result of an op."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = [each.numel() for each in tree_leaves(made) if isinstance(each, Tensor)]
        self.most = max([self.most, *found])
        return made


@pytest.mark.parametrize("first", [0, 7, 20])
def test_flops_of_a_window_are_of_the_pairs_that_are_seen(first: int) -> None:
    q, k = (torch.empty(2, h, n, 8, device="meta") for h, n in ((4, 13), (2, 17)))
    for causal, window in WINDOWS:
        pairs = int(in_window(13, 17, causal, window, first).sum())
        given = q, k, k, None, causal, None, 0.0, None, 0, [0, 0, first, 0], window
        assert FLOPS[attention](*given) == 2 * 2 * 2 * 4 * 8 * pairs
        backward = q, q, k, k, q, q[..., 0], None, causal, None, False, *given[6:]
        assert FLOPS[attention_backward](*backward) == 5 * 2 * 2 * 4 * 8 * pairs


def test_dropout_leaves_the_same_however_the_whole_is_sharded() -> None:
    q, k, seed = torch.zeros(4, 4, 16, 1), torch.zeros(4, 4, 32, 1), torch.tensor(7)
    whole = drawn(q, k, 0.25, seed, 3, [])
    shard = drawn(q[:2, :2, :8], k[:2, :2, :16], 0.25, seed, 3, [2, 1, 8, 16])
    assert whole is not None and shard is not None
    assert torch.equal(shard, whole[2:, 1:3, 8:, 16:])
    assert abs(whole.double().mean() - 0.75) < 0.02
    other = drawn(q, k, 0.25, seed, 4, [])
    assert other is not None and 0.6 < (whole == other).double().mean() < 0.65  # 0.75**2 + 0.25**2


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_and_its_gradient(device: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 6, 8, dtype=torch.float64, device=device, requires_grad=True) for h in (4, 2, 2))
    seed = torch.tensor(5, device=device)
    out, _ = attention(q, k, v, None, True, None, 0.25, seed, 3)
    keep = drawn(q, k, 0.25, seed, 3, [])
    assert keep is not None
    scores = (q @ k.repeat_interleave(2, 1).mT) * 8**-0.5
    seen = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1) * keep / 0.75
    expected = weights @ v.repeat_interleave(2, 1)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        [out, *torch.autograd.grad(out, (q, k, v), grad)],
        [expected, *torch.autograd.grad(expected, (q, k, v), grad)],
        strict=True,
    ):
        assert (ours - theirs).abs().max() < 1e-12


# ---- capture -------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention on what stands in for projections, with gradients to see."""

    def __init__(self, shapes: list[tuple[int, ...]], mask: Tensor | None = None, **options: object) -> None:
        super().__init__()
        self.given = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in shapes)
        if mask is not None and mask.is_floating_point():
            self.mask: Tensor | None = nn.Parameter(mask)
        else:
            self.register_buffer("mask", mask)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.given
        out: Tensor = F.scaled_dot_product_attention(q * x, k, v, attn_mask=self.mask, **self.options)  # type: ignore
        return out


def attentions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if "attention" in str(node.op)]


ONE, BIAS, SEEN = torch.randn(5, dtype=torch.float64), torch.randn(4, 6, 5, dtype=torch.float64), torch.rand(6, 5) > 0.3
FOUR = [(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)]
FORMS: dict[str, tuple[list[tuple[int, ...]], Tensor | None, dict[str, object]]] = {
    "plain": (FOUR, None, {}),
    "causal": (FOUR, None, {"is_causal": True}),
    "scale": (FOUR, None, {"scale": 0.3}),
    "groups": ([(2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 8)], None, {"enable_gqa": True}),
    "one key head": ([(2, 4, 6, 8), (2, 1, 5, 8), (2, 1, 5, 8)], None, {}),
    "one query head": ([(2, 1, 6, 8), (2, 4, 5, 8), (1, 4, 5, 8)], None, {}),
    "one dim of a mask": (FOUR, ONE, {}),
    "three dims of a mask": (FOUR, BIAS, {}),
    "bool mask": (FOUR, SEEN, {}),
    "mask of another dtype": (FOUR, BIAS.float(), {}),
    "no heads": ([(4, 6, 8), (4, 5, 8), (4, 5, 8)], BIAS, {}),
    "one sequence": ([(6, 8), (5, 8), (5, 3)], SEEN, {}),
    "two batches": ([(3, 2, 4, 6, 8), (3, 2, 4, 5, 8), (1, 2, 4, 5, 8)], torch.rand(2, 1, 6, 5) > 0.3, {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_capture_keeps_it_whole(form: str) -> None:
    torch.manual_seed(0)
    shapes, mask, options = FORMS[form]
    model, x = Attends(shapes, mask, **options), torch.rand(1, dtype=torch.float64)
    captured = capture(model, Mesh(dp=2), args=(x,), loss=lambda out: (out**2).sum())
    assert [str(node.op) for node in attentions(captured.graph)] == [
        "shardfx.attention.default",
        "shardfx.attention_backward.default",
    ]
    assert all(is_heavy(node) for node in attentions(captured.graph))
    (model(x) ** 2).sum().backward()
    inputs = {**dict(model.named_parameters()), **dict(model.named_buffers()), "args.0": x}
    inputs |= {g.name: g.constant for g in captured.graph.inputs if g.constant is not None}
    values = interpret(captured.graph, inputs)
    gradients = {o.name: values[o.value] for o in captured.graph.outputs if o.kind is OutputKind.GRADIENT}
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        bound = 1e-5 if parameter.dtype == torch.float32 else 1e-12
        assert (gradients[name] - parameter.grad).abs().max() < bound


# ---- what a program calls -----------------------------------------------------------------------------------------


def code_on(model: nn.Module, device: str) -> str:
    given = sx.Hints(args=(torch.rand(1, dtype=torch.float64),), loss=lambda out: out.sum())
    planned = sx.parallelize(model, Mesh(dp=2), given).planned
    assert attentions(planned)
    kinds = {OutputKind.LOSS, OutputKind.GRADIENT}
    return lower(planned, 0, default_rules(), kinds, torch.device(device)).module().code


@pytest.mark.parametrize(
    "form", ["plain", "causal", "groups", "one dim of a mask", "bool mask", "three dims of a mask"]
)
def test_each_device_has_its_own_kernel(form: str) -> None:
    """Torch's own for the CPU where it takes the call: not with a bool mask, nor for the gradient of a mask."""
    shapes, mask, options = FORMS[form]
    model = Attends(shapes, mask, **options)
    code = code_on(model, "cpu")
    of_mask = mask is not None and mask.is_floating_point()
    assert ("flash_attention_for_cpu.default" in code) == (form != "bool mask")
    assert ("flash_attention_for_cpu_backward.default" in code) == (mask is None)
    assert ("shardfx.attention_backward" in code) == (of_mask or form == "bool mask")
    assert "device(type='cpu')" in code and "cuda" not in code
    code = code_on(model, "cuda")
    assert "device(type='cuda')" in code and "'cpu'" not in code
    assert "flash" not in code and "shardfx.attention_backward" in code and "shardfx.attention.default" in code


@pytest.mark.parametrize("columns", [8, 5], ids=["one width", "two widths"])
def test_a_query_that_is_infinite_is_in_every_gradient_that_it_is_in_of_torchs(columns: int) -> None:
    q, k, v = (torch.randn(2, 4, n, m, dtype=torch.float64) for n, m in ((6, 8), (5, 8), (5, columns)))
    q[0, 0, 1, 2] = float("inf")
    inputs = [each.requires_grad_() for each in (q, k, v)]
    ours, theirs = attention(q, k, v)[0], F.scaled_dot_product_attention(q, k, v)
    grad = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
