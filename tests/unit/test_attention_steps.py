"""Attention in steps: the ops beside attention itself, and the laws by which a ring is proven."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import Tensor

import shardfx as sx
from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Graph
from shardfx.ir.ops.context.attention_steps import (
    attention_step,
    attention_step_backward,
    parts_of,
    rotate,
)
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text.parser import parse_graph
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.proof.terms import same_function
from tests.virtual.test_context_parallel import plan, rows_of

MASKS = {
    "all": (False, (), False, 0.0),
    "causal": (True, (), False, 0.0),
    "a window": (True, (7, 0), False, 0.0),
    "documents": (True, (), True, 0.0),
    "a window of documents": (False, (4, 3), True, 0.0),
    "a soft cap": (True, (), False, 1.5),
    "a window and a soft cap": (True, (7, 0), False, 1.5),
}


@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_steps_are_attention(mask: str, stripes: int) -> None:
    causal, window, documents, softcap = MASKS[mask]
    torch.manual_seed(0)
    view = stripes, 4, 5
    q, grad = (torch.randn(2, 4, stripes * 20, e, dtype=torch.float64) for e in (8, 6))
    k, v = (torch.randn(2, 2, stripes * 20, e, dtype=torch.float64) for e in (8, 6))
    ids = torch.randint(3, (2, stripes * 20)) if documents else None
    sinks = torch.randn(4, dtype=torch.float64) if stripes > 1 else None
    how = causal, None, 0.0, None, 0, [], list(window), ids, ids, softcap, sinks

    def blocks(x: Tensor) -> Tensor:
        return x.unflatten(2 if x.dim() > 2 else 1, view)

    in_blocks = (*how[:7], *(None if ids is None else blocks(ids) for _ in range(2)), softcap, sinks)
    out, rows = attention(q, k, v, None, *how)
    made = sums = None
    for shift in (2, 0, 3, 1):  # in any order
        sofar = {} if made is None else {"out": made[0], "logsumexp": made[1]}
        made = attention_step(*map(blocks, (q, k, v)), None, *in_blocks, **sofar, shift=shift, last=shift == 1)
    torch.testing.assert_close(tuple(each.flatten(2, 4) for each in made), (out, rows), rtol=0, atol=1e-13)
    expected = attention_backward(grad, q, k, v, out, rows, None, *how[:2], False, *how[2:])
    for shift in range(4):
        given = map(blocks, (grad, q, k, v, out, rows))
        part = attention_step_backward(*given, None, *in_blocks[:2], False, *in_blocks[2:], shift=shift)
        *part, of_sinks = part[0], *(rotate(each, 3, -shift) for each in part[1:3]), part[3]
        sums = part if sums is None else [a + b for a, b in zip(sums, part, strict=True)]
    torch.testing.assert_close([each.flatten(2, 4) for each in sums], [*expected[:3]], rtol=0, atol=1e-13)
    torch.testing.assert_close(of_sinks, expected[4], rtol=0, atol=1e-13)


def test_a_step_takes_no_dense_mask() -> None:
    x = torch.randn(1, 1, 1, 2, 2, 4)
    with pytest.raises(ValueError, match="no dense mask"):
        attention_step(x, x, x, torch.zeros(2, 2))


def test_a_window_that_wraps_has_rows_behind_the_seam() -> None:
    window = Window(4, 1, 1, -1, -1, wraps=True)
    assert [window.rows(o, 1, 4) for o in range(4)] == [(3, 1), (0, 1), (1, 1), (2, 1)]
    assert window.rows(0, 2, 4) == (0, 4)  # rows 3 and 0: no one range


def test_stripes_share_a_causal_mask_equally() -> None:
    """The pairs that each of eight ranks computes; of its own block those up to the diagonal."""

    def work(own: int, stripes: int, rows: int) -> float:
        found = 0.0
        for other in range(8):
            for part in parts_of((1, 1, stripes, rows), 8, own, other, True, (), False):
                many, keys = (each.stop - each.start for each in (part.stripes, part.keys))
                found += many * keys * rows**2 * (0.5 if part.causal else 1)
        return found

    for stripes, most in ((1, 1.88), (16, 1.06)):
        each = [work(own, stripes, 1024 // stripes) for own in range(8)]
        assert max(each) / (sum(each) / 8) < most


@cache
def ring(rows: int = 12) -> tuple[Graph, str]:
    pm, _ = plan(sx.Mesh(cp=3), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "ring")}, rows_of(rows=rows))
    return pm.captured, str(pm.planned)


STEP, BACKWARD = r"(attention_step\(.*?shift=)1(.*)", r"(attention_step_backward\(.*?shift=)1(.*)"
WRONG = {
    "a block that is seen twice": (STEP, r"\g<1>2\2"),
    "a block that is never seen": (r"(attention_step\(.*?), out=%\d+, logsumexp=%\d+, shift=1", r"\1"),
    "one mask of several": (r"(attention_step\(.*?), None, True(.*shift=1)", r"\1\2"),
    "a result between steps": (r", last=True", r""),
    "gradients of one block twice": (BACKWARD, r"\g<1>2\2"),
    "gradients that stay where the queries are": (r"(rotate\(.*?), -1\)", r"\1, 0)"),
    "gradients sent on": (r"(rotate\(.*?), -1\)", r"\1, 1)"),
    "blocks as on one rank": (r"(rotate\(.*?), -1\)", r"\1, -1, place=[3, 1, 3, 0])"),
    "values in the place of keys": (r"attention_step\((%\d+), (%\d+), (%\d+)", r"attention_step(\1, \3, \2"),
    "a gradient of another result": (
        r"attention_step_backward\((%\d+), (%\d+), (%\d+), (%\d+), (%\d+)",
        r"attention_step_backward(\5, \2, \3, \4, \1",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rings_are_not_proven(wrong: str) -> None:
    captured, text = ring()
    damaged = re.sub(*WRONG[wrong], text, count=1)
    assert damaged != text
    assert isinstance(same_function(captured, parse_graph(damaged), default_rules()), Fault)


def test_rows_behind_the_last_one_are_proven_not_to_matter() -> None:
    captured, text = ring(13)
    assert not isinstance(same_function(captured, parse_graph(text), default_rules()), Fault)
    wrong = {
        "other rows of the result": re.sub(r"(slice.Tensor\(%\d+, 2), 0, 13\)", r"\1, 2, 15)", text),
        "no mask": re.sub(r"(attention_step(_backward)?\(.*?), None, True", r"\1", text),
        "rows that are not zeros": re.sub(r"(constant_pad_nd\(%\d+, \[0, 0, 0, 2\])\)", r"\1, 1.0)", text),
        "as many rows as it is not": re.sub(r"(constant_pad_nd\(%\d+), \[0, 0, 0, 2\]\)", r"\1, [0, 0, 0, 3])", text),
    }
    for name, damaged in wrong.items():
        assert damaged != text, name
        assert isinstance(same_function(captured, parse_graph(damaged), default_rules()), Fault), name


def test_steps_over_other_blocks_are_not_joined() -> None:
    """The first block of three is not the first stripe's first block of three stripes, whatever shape it is given."""
    captured, text = ring()
    found = re.search(r"  (%\d+), (%\d+) = shardfx.attention_step\((%\d+), (%\d+), (%\d+), None, True\) : .*\n", text)
    assert found is not None
    out, rows, *operands = found.groups()
    place = found.group(0)[found.group(0).index("  @ ") :]
    q, k, v = ([2, heads, 2, 3, 2, 4] for heads in (8, 4, 4))
    lines = [
        f"  %90{i} = aten.reshape({value}, {shape}) : f64{shape}{place}"
        for i, (value, shape) in enumerate(zip(operands, (q, k, v), strict=True))
    ]
    lines.append(
        f"  %903, %904 = shardfx.attention_step(%900, %901, %902, None, True) : f64{q}, f64{q[:-1]}{place}"
        f"  {out} = aten.reshape(%903, [2, 8, 1, 3, 4, 4]) : f64[2, 8, 1, 3, 4, 4]{place}"
        f"  {rows} = aten.reshape(%904, [2, 8, 1, 3, 4]) : f64[2, 8, 1, 3, 4]{place}"
    )
    damaged = text.replace(found.group(0), "".join(lines))
    assert isinstance(same_function(captured, parse_graph(damaged), default_rules()), Fault)


def test_the_order_of_steps_does_not_matter() -> None:
    captured, text = ring()
    assert not isinstance(same_function(captured, parse_graph(text), default_rules()), Fault)
    swapped = re.sub(r"(attention_step(?:_backward)?\(.*?shift=)([12])", lambda m: m[1] + "21"[int(m[2]) - 1], text)
    swapped = re.sub(r"(rotate\(.*?, -)([12])", lambda m: m[1] + "21"[int(m[2]) - 1], swapped)
    assert swapped != text
    assert not isinstance(same_function(captured, parse_graph(swapped), default_rules()), Fault)
