"""The language of rules: each word of a template, on nodes small enough to see what it says."""

from __future__ import annotations

import pytest
import torch

from shardfx.ir.errors import Error
from shardfx.ir.oracle.instance import instance
from shardfx.ir.oracle.soundness import refutations
from shardfx.ir.rules.book import Contiguous, rule
from shardfx.ir.rules.sharding_rule import Linear, ShardingRule, rule_text
from shardfx.ir.rules.template import Template
from tests.op_calls import f, i

aten = torch.ops.aten


def made(text: str, op: object, *args: object, **options: str) -> ShardingRule:
    return Template(text, **options)(instance(op, args).node)


@pytest.mark.parametrize(
    ("text", "call", "says"),
    [
        ("n.. d! -> n.. d!", (aten.relu.default, f(2, 3, 4)), "n0 n1 d! -> n0 n1 d!"),
        (
            "n!reduction=1 c, n, c -> , ",
            (aten.nll_loss_forward.default, f(4, 5), i(5, 4), None, 2, -100),
            "n c, n -> , ",
        ),
        ("d.., ... -> d.., ...", (aten.add.Tensor, f(4, 6), f(4, 1)), "d0 d1, d0 1 -> d0 d1"),
        ("(h d) n -> h d n", (aten.view.default, f(6, 5), [2, 3, 5]), "(h d) n -> h d n"),
        ("(h d) n -> h d n", (aten.view.default, f(6, 5), [1, 6, 5]), "d n -> h d n"),
        ("n h*2! -> n p*2!", (aten.max_pool2d.default, f(2, 4, 4), 2), "n h0! h1! -> n p0! p1!"),
        ("d.. k@dim! -> d.. k@dim", (aten.cumsum.default, f(2, 3, 4), -2), "d0 k! d1 -> d0 k! d1"),
        ("d.. k@dim -> d.. 1@dim", (aten.sum.dim_IntList, f(2, 3, 4), [0, 2], True), "k0 d0 k1 -> 1 d0 1"),
        ("d.. k@dim -> d.. 1@dim", (aten.sum.dim_IntList, f(2, 3), None), "k0 k1 -> "),
        ("d@dims -> d..", (aten.permute.default, f(2, 3, 4), [2, 0, 1]), "d1 d2 d0 -> d0 d1 d2"),
        ("d.. k@1! -> d.. k@1", (aten.relu.default, f(2, 3, 4)), "d0 k! d1 -> d0 k! d1"),
        ("d.. c@dim! -> d.., ...", (aten.unbind.int, f(2, 3), 1), "d0 c! -> d0, d0, d0"),
        ("~m n, m k!, k! n -> m n", (aten.addmm.default, f(5), f(4, 6), f(6, 5)), "n, m k!, k! n -> m n"),
        ("~m n, m k!, k! n -> m n", (aten.addmm.default, f(4, 1), f(4, 6), f(6, 5)), "m 1, m k!, k! n -> m n"),
        (
            "n.. d*normalized_shape!, d.., d.. -> n.. d.., n.. 1*d, n.. 1*d",
            (aten.native_layer_norm.default, f(2, 3, 4), [3, 4], f(3, 4), None, 1e-5),
            "n0 d0! d1!, d0! d1! -> n0 d0! d1!, n0 1 1, n0 1 1",
        ),
    ],
)
def test_a_word(text: str, call: tuple[object, ...], says: str) -> None:
    assert rule_text(made(text, *call)) == says


def test_a_factor_is_replicated_by_an_argument() -> None:
    text, call = "d.. k@dim!keepdim -> d.. 1@dim", (aten.sum.dim_IntList, f(2, 3, 4), [0])
    assert rule_text(made(text, *call, True)) == "k0! d0 d1 -> 1 d0 d1"
    assert rule_text(made(text, *call, False)) == "k0 d0 d1 -> d0 d1"


@pytest.mark.parametrize(
    ("linear", "call", "groups"),
    [
        ("0|1", (aten.mul.Tensor, f(4), f(4)), ({0}, {1})),
        ("0&1", (aten.add.Tensor, f(4), f(4)), ({0, 1},)),
        ("0&1", (aten.add.Tensor, f(4), 2.0), ()),  # each rank would add the number
        ("0|1", (aten.mul.Tensor, f(4), 2.0), ({0},)),
        ("&", (aten.stack.default, [f(4), f(4), f(4)]), ({0, 1, 2},)),
    ],
)
def test_linear(linear: str, call: tuple[object, ...], groups: tuple[set[int], ...]) -> None:
    text = "d.., ... -> d.." if call[0] is not aten.stack.default else "d.., ... -> s! d.."
    assert tuple(each.operands for each in made(text, *call, linear=linear).linear) == groups


def test_a_function_of_the_node_gives_a_template() -> None:
    def flipped(node: object) -> str:
        return "d.. k@dims! -> d.. k@dims"

    entry = rule(aten.flip.default, flipped, linear="0")
    of = instance(aten.flip.default, (f(4, 6), [1]))
    found = entry.make(of.node)
    assert found is not None and rule_text(found) == "d0 k0! -> d0 k0!" and found.linear == (Linear(frozenset({0})),)
    assert entry.text == "flipped" and not refutations(entry, of)


def test_sized_arguments_follow_a_sharding() -> None:
    text, call = "n (g c!) s..!, (g c), (g c) -> n (g c) s.., n g, n g", (f(4, 6, 5), f(6), f(6), 4, 6, 5, 3, 1e-5)
    of, sized = instance(aten.native_group_norm.default, call), {"N": "n", "C": "(g c)", "group": "g"}
    assert refutations(rule(of.node.op, text, contiguous=Contiguous.ALL), of)
    assert not refutations(rule(of.node.op, text, contiguous=Contiguous.ALL, sized=sized), of)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m k, k n", "has no arrow"),
        ("m k, k n -> m n n", "does not have as many dims"),
        ("m k@dimm, k n -> m n", "an argument that the op does not have"),
        ("m k -> m", "does not fit its tensor arguments"),
        ("m k, n k -> m n", "does not fit the rule"),
        ("m (k l), (k l) n -> m n", "leaves sizes open"),
    ],
)
def test_bad_templates(text: str, says: str) -> None:
    with pytest.raises(Error, match=says):
        made(text, aten.mm.default, f(4, 6), f(6, 5))
