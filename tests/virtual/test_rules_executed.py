"""The rules of a plan are executed: the user's at planning, where a wrong one is an error, all by ``pm.verify()``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import shardfx as sx
from shardfx.cli import main
from tests.wrong.rules import COLUMNS, ROWS, WRONG, Calls, by_fours, numbered, ops, planned

aten = torch.ops.aten


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_an_error_at_planning(name: str) -> None:
    with pytest.raises(sx.Error, match=r"the rule of .* is wrong, shard(?:ed|ing) .*\{r\}") as caught:
        planned(*WRONG[name])
    assert "where one device gives" in caught.value.what or "differ" in caught.value.what, caught.value


def test_verify_refutes_a_wrong_rule_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, call, spec = WRONG["flip"]
    monkeypatch.setattr("shardfx.plugins._plugin_rules", lambda: (rule,))
    hints = sx.Hints(args=(torch.randn(8, 12, dtype=torch.float64),), specs={"args.0": spec})
    verdict = sx.parallelize(Calls(call), sx.Mesh(r=2), hints, virtual=True).verify()
    assert not verdict and "the rule of aten.flip is wrong" in verdict.why and "{r}" in verdict.why


def test_a_right_rule_is_executed_once_in_a_process() -> None:
    rule = sx.rule(ops.numbered.default, "n! d -> n! d")
    pm = planned(rule, numbered, COLUMNS)
    verdict = pm.verify()
    assert verdict and verdict.checked["executed before"] == 1 and "shares executed" not in verdict.checked


def test_a_share_that_fails_on_the_local_shape_is_refuted() -> None:
    """4 rows of 12 on each of three ranks would do, 6 on each of two do not, by the op's fake version."""
    rule = sx.rule(ops.by_fours.default, "n d -> n d")
    hints = sx.Hints(args=(torch.randn(12, 4, dtype=torch.float64),), specs={"args.0": ROWS}, rules=[rule])
    with pytest.raises(sx.Error, match=r"(?s)by_fours.*rows come in fours"):
        sx.parallelize(Calls(by_fours), sx.Mesh(r=2), hints, virtual=True)
    assert sx.parallelize(Calls(by_fours), sx.Mesh(r=3), hints, virtual=True).verify()


def test_large_shapes_are_executed_on_small_shapes() -> None:
    """Without weights: a wrong sharding of 512 ranks is seen on two."""
    x = torch.empty(4096, 8192, dtype=torch.float32, device="meta")

    def plan(form: str) -> sx.ParallelModule:
        hints = sx.Hints(args=(x,), specs={"args.0": COLUMNS}, rules=[sx.rule(aten._softmax.default, form)])
        return sx.parallelize(Calls(lambda x: x.softmax(1)), sx.Mesh(r=8), hints, virtual=True)

    assert plan("n d! -> n d!").verify()
    with pytest.raises(sx.Error, match=r"the rule of aten\._softmax is wrong"):
        plan("n d -> n d")


@pytest.mark.long
def test_a_kernel_that_misreads_strides_is_given_none() -> None:
    """That of ``embedding_bag`` takes indices for packed: one of every second element read others."""
    x, index = torch.randn(6, 8, dtype=torch.float64), torch.arange(24).view(6, 4) % 6

    class Bags(torch.nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return F.embedding_bag(index, x * 2, mode="mean")

    for specs in ({"args.0": COLUMNS}, {"args.1": ROWS}):
        hints = sx.Hints(args=(x, index), specs=specs)
        pm = sx.parallelize(Bags(), sx.Mesh(r=2), hints, virtual=True)
        assert pm.verify(), pm.verify().why
        assert torch.allclose(pm(x, index), F.embedding_bag(index, x * 2, mode="mean"))


def test_assumptions_are_in_the_verdict_and_in_the_readme() -> None:
    verdict = planned(sx.rule(ops.numbered.default, "n! d -> n! d"), numbered, COLUMNS).verify()
    words = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert verdict.assumptions
    for each in verdict.assumptions:
        assert each in str(verdict) and each in words


def test_answers_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = torch.randn(4, 6, dtype=torch.float64)
    hints = sx.Hints(args=(x,), specs={"args.0": ROWS})
    pm = sx.parallelize(Calls(lambda x: F.relu(x) * 2), sx.Mesh(r=2), hints, virtual=True)
    assert pm.verify().checked["shares executed"] == 2
    (kept,) = (tmp_path / "shardfx" / "checked").iterdir()
    assert len(list(kept.iterdir())) == 2
    assert pm.verify().checked["executed before"] == 2


# ---- by hand


def test_check_rule_names_op_sharding_and_both_numbers() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    sx.check_rule(sx.rule(aten._softmax.default, "n d! -> n d!"), x, 1, False)
    with pytest.raises(sx.Error, match="where one device gives") as caught:
        sx.check_rule(sx.rule(aten._softmax.default, "n d -> n d"), x, 1, False)
    assert "aten._softmax" in str(caught.value) and "d over a=2" in str(caught.value)


def test_zeros_ties_and_the_ends_of_a_range_are_tried() -> None:
    """Right for positive numbers, or indices that stand in the first shard, alone."""
    with pytest.raises(sx.Error, match="is wrong"):
        sx.check_rule(sx.rule(aten.abs.default, "n d -> n d", linear="0"), torch.rand(4, 6, dtype=torch.float64))
    table, index = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 0])
    with pytest.raises(sx.Error, match="is wrong"):
        sx.check_rule(sx.rule(aten.embedding.default, "v d, n -> n d", reduce="same"), table, index)


def test_the_command_lists_and_checks_rules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = sx.rule(ops.numbered.default, "n! d -> n! d")
    bad = sx.rule(aten.relu.default, "n d -> n d", linear="0")
    monkeypatch.setattr("shardfx.cli.plugin_rules", lambda: [(good, "mine 1.0")])
    assert main(["rules"]) == 0
    assert "n! d -> n! d" in capsys.readouterr().out
    monkeypatch.setattr("shardfx.cli.plugin_rules", lambda: [(good, "mine 1.0"), (bad, "theirs 2.0")])
    assert main(["rules"]) == 2
    shown = capsys.readouterr()
    assert "theirs 2.0" in shown.out and "where one device gives" in shown.err
