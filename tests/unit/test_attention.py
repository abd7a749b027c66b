"""Attention as one op: its kernels beside torch's attention, what capture keeps, what a device's program calls."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.capture.graph_interpreter import interpret
from shardfx.ir.capture.trace import capture
from shardfx.ir.graph import Graph, Node, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.fused_attention import attention, drawn, forward_by_hand
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
    for columns, causal, mask, of_mask in itertools.product((8, 5), (False, True), masks(dtype, s, t), (False, True)):
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


@pytest.mark.parametrize("columns", [8, 5], ids=["by a kernel", "by hand"])
def test_a_query_that_is_infinite_is_in_every_gradient_that_it_is_in_of_torchs(columns: int) -> None:
    q, k, v = (torch.randn(2, 4, n, m, dtype=torch.float64) for n, m in ((6, 8), (5, 8), (5, columns)))
    q[0, 0, 1, 2] = float("inf")
    inputs = [each.requires_grad_() for each in (q, k, v)]
    ours, theirs = attention(q, k, v)[0], F.scaled_dot_product_attention(q, k, v)
    grad = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
