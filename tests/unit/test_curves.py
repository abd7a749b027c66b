"""Measured seconds of calls: curves, machines that have some, probes, and what is not hidden behind computing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.cost import probes
from shardfx.ir.cost.amounts import Cost, Work
from shardfx.ir.cost.curve import Curve
from shardfx.ir.cost.machine import Machine
from shardfx.ir.timing.rank_tasks import Purpose, RankTask
from shardfx.ir.timing.simulate import simulate_ranks

LINKS = Machine.load("cpu-laptop").links


def machine(**curves: Curve) -> Machine:
    return Machine("m", {"float32": 1e9, "float64": 5e8}, 1e9, 1e9, LINKS, overhead=0.5, curves=curves)


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve(((10.0, 2.0), (20.0, 4.0)))
    assert [curve.seconds(x) for x in (0.0, 5.0, 10.0, 15.0, 20.0, 60.0)] == [2.0, 2.0, 2.0, 3.0, 4.0, 12.0]
    assert Curve(((0.0, 3.0),)).seconds(5.0) == 3.0, "what takes the same, whatever it does"
    assert Curve.of([(4.0, 2.0), (1.0, 3.0), (2.0, 1.0)]) == Curve(((1.0, 1.0), (2.0, 1.0), (4.0, 2.0)))


def test_a_call_takes_what_was_measured_of_its_kind() -> None:
    known = machine(gelu=Curve(((1e3, 7.0),)), mm=Curve(((1e3, 9.0),)), view=Curve(((0.0, 0.25),)))
    assert Work(0.0, 500.0, kind="gelu").seconds(known) == 7.0
    assert Work(1e3, 8.0, kind="mm").seconds(known) == 9.0, "by operations, where it has some"
    assert Work(1e3, 8.0, torch.float64, "mm").seconds(known) == 18.0, "as much longer as its products take"
    assert Work(0.0, 0.0, kind="view").seconds(known) == 0.25
    assert Work(2e9, 1e9, kind="bmm").seconds(known) == 2.5, "of others by the rates"


def test_kinds_that_were_not_measured_take_what_products_and_touching_do() -> None:
    known = machine(product=Curve(((1e3, 4.0),)), touch=Curve(((1e3, 1.0),)))
    assert Work(1e3, 1e3).seconds(known) == 4.0
    assert Work(1e3, 1e4).seconds(known) == 10.0, "what takes longer"
    assert Work(0.0, 1e3).seconds(known) == 1.0


def test_a_curve_of_a_dtype_counts_before_one_in_float32() -> None:
    known = machine(
        **{
            "product": Curve(((1e3, 4.0),)),
            "product float64": Curve(((1e3, 5.0),)),
            "narrow product float64": Curve(((1e3, 1.0),)),
            "touch": Curve(((1e3, 7.0),)),
        }
    )
    assert Work(1e3, 1.0, torch.float64).seconds(known) == 5.0
    assert Work(1e3, 1e4, torch.float64).seconds(known) == 10.0, "of few columns, by bytes"
    assert Work(1e3, 1e3).seconds(known) == 7.0, "in float32 nothing is known of narrow ones"


def test_a_program_takes_as_long_as_device_or_host() -> None:
    known = replace(machine(), host_call=2.0, host_view=0.5)
    cost = Cost({Work(0.0, 1e8): 3, Work(0.0, 0.0, kind="view"): 4})
    assert cost.computing(known) == pytest.approx(3 * 0.6) and cost.issuing(known) == 8.0
    assert cost.seconds(known, sx.Mesh(dp=1)) == 8.0 and (1000 * cost).seconds(machine(), sx.Mesh(dp=1)) == 1800
    assert Machine.parse(known.json()) == known


def test_machines_with_curves_are_read_and_written() -> None:
    known = machine(gelu=Curve(((1e3, 7.0), (2e3, 8.0))))
    assert Machine.parse(known.json()) == known
    with pytest.raises(sx.Error, match="must rise"):
        Machine.parse(known.json().replace("8.0", "6.0"))


CPU = probes.ProbeSite(torch.device("cpu"))
PROBED = [probes.Heavy(op, make, probes.ROWS["cpu"]) for op, make in probes.BY_ROWS.items()]
PROBED += [*probes.HEAVY["cpu"], *probes.HEAVY["cuda"]]


@pytest.mark.parametrize("heavy", PROBED, ids=lambda each: each.name)
def test_a_probe_calls_its_op_and_knows_how_much_that_does(
    heavy: probes.Heavy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, those for CUDA too."""
    monkeypatch.setattr(probes, "TOKENS", 64)
    monkeypatch.setattr(probes, "HEADS", 2)
    for make in (heavy.make, *heavy.more):
        amounts = [probes._amount(heavy.op, make(size, CPU))[0] for size in (16, 32)]
        assert 0 < amounts[0] < amounts[1]


# ---- what is not hidden


def test_a_machine_that_does_not_send_by_itself_hides_nothing() -> None:
    call, purpose = fx.Graph().placeholder("a"), Purpose("B", 0)
    first, second = (RankTask("compute", purpose, seconds) for seconds in (1.0, 2.0))
    start = RankTask("start", purpose, 3.0, 0, call, "dp", hidden=False)
    (course,) = simulate_ranks([[first, start, second, RankTask("wait", purpose, 0, 0, call)]])
    assert course.exposed == 3.0 and tuple(course.spans[sx.schedules.Action("B", 0, 0)]) == (0.0, 6.0)


def test_who_sends_lays_out_and_who_receives_takes_in() -> None:
    forward, message = Purpose("F", 0), (0, 1, 0)
    compute, send = RankTask("compute", forward, 1.0), RankTask("start", forward, 4.0, message=message, hidden=False)
    sender = [compute, send, compute]
    taker = [RankTask("wait", Purpose("R"), message=message), RankTask("compute", Purpose("F", 1), 1.0)]
    first, second = simulate_ranks([sender, taker])
    assert tuple(first.spans[sx.schedules.Action("F", 0, 0)]) == (0.0, 4.0) and first.exposed == 2.0
    assert tuple(second.spans[sx.schedules.Action("F", 1, 0)]) == (5.0, 6.0) and second.exposed == 2.0
