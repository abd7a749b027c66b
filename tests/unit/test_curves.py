"""Measured seconds of calls: curves, machines that have some, probes, and what is not hidden behind computing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.cost.amounts import Work
from shardfx.ir.cost.curve import Curve
from shardfx.ir.cost.machine import Machine
from shardfx.ir.cost.measuring import probes
from shardfx.ir.ops.traits import base_name_of
from shardfx.ir.timing import foreseen
from shardfx.ir.timing.doings import Receives, Sends, Starts, Waits, Works
from shardfx.ir.timing.purposes import Purpose

LINKS = Machine.load("cpu-laptop").links


def machine(**curves: Curve) -> Machine:
    return Machine("m", {"float32": 1e9, "float64": 5e8}, 1e9, 1e9, LINKS, overhead=0.5, curves=curves)


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve(((10.0, 2.0), (20.0, 4.0)))
    assert [curve.seconds(x) for x in (0.0, 5.0, 10.0, 15.0, 20.0, 60.0)] == [2.0, 2.0, 2.0, 3.0, 4.0, 12.0]
    assert Curve(((0.0, 3.0),)).seconds(5.0) == 3.0, "what takes the same, whatever it does"


def test_what_takes_less_than_a_smaller_one_counts_for_that_as_well() -> None:
    assert Curve.of([(4.0, 2.0), (1.0, 3.0), (2.0, 1.0)]) == Curve(((1.0, 1.0), (2.0, 1.0), (4.0, 2.0)))


@pytest.mark.parametrize("points", [(), ((1.0, 2.0), (1.0, 3.0)), ((1.0, 2.0), (2.0, 1.0)), ((1.0, -1.0),)])
def test_seconds_that_do_not_rise_are_an_error(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(sx.Error, match="must rise"):
        Curve(points)


def test_a_call_takes_what_was_measured_of_its_kind() -> None:
    known = machine(gelu=Curve(((1e3, 7.0),)), mm=Curve(((1e3, 9.0),)), view=Curve(((0.0, 0.25),)))
    assert Work(0.0, 500.0, kind="gelu").seconds(known) == 7.0
    assert Work(1e3, 8.0, kind="mm").seconds(known) == 9.0, "by operations, where it has some"
    assert Work(1e3, 8.0, torch.float64, "mm").seconds(known) == 18.0, "as much longer as its products take"
    assert Work(0.0, 0.0, kind="view").seconds(known) == 0.25
    assert Work(0.0, 0.0, kind="view").seconds(machine()) == 0.0
    assert Work(2e9, 1e9, kind="bmm").seconds(known) == 2.5, "of others by the rates"


def test_kinds_that_were_not_measured_take_what_products_and_touching_do() -> None:
    known = machine(product=Curve(((1e3, 4.0),)), touch=Curve(((1e3, 1.0),)))
    assert Work(1e3, 1e3).seconds(known) == 4.0
    assert Work(1e3, 1e4).seconds(known) == 10.0, "what takes longer"
    assert Work(0.0, 1e3).seconds(known) == 1.0


def test_machines_with_curves_are_read_and_written() -> None:
    known = machine(gelu=Curve(((1e3, 7.0), (2e3, 8.0))))
    assert Machine.parse(known.json()) == known
    with pytest.raises(sx.Error, match="must rise"):
        Machine.parse(known.json().replace("8.0", "6.0"))


@pytest.mark.parametrize("kind", [*probes.KINDS, *probes.ON_CPU], ids=base_name_of)
def test_a_probe_calls_its_op_and_knows_how_much_that_does(kind: torch._ops.OpOverload) -> None:
    make, sizes = (probes.KINDS | probes.ON_CPU)[kind]
    amounts = [probes._amount(kind, make(size, torch.device("cpu")))[0] for size in sizes[:2]]
    assert 0 < amounts[0] < amounts[1]


def test_probes_take_off_what_stands_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts calls of ops: 1 for a product, 3 for an exp."""
    monkeypatch.setattr(probes, "PASSES", 2)
    ticks = 0.0

    class Exp:
        @staticmethod
        def _op(x: torch.Tensor) -> torch.Tensor:
            nonlocal ticks
            ticks += 3
            return x

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal ticks
        ticks += 1
        return a

    monkeypatch.setattr(torch, "mm", product)
    clock: Callable[[], float] = lambda: ticks  # noqa: E731
    assert probes._seconds(Exp, [(torch.ones(1),)] * 5, torch.device("cpu"), clock) == 3.0


# ---- what is not hidden


def test_a_machine_that_does_not_send_by_itself_hides_nothing() -> None:
    call, purpose = fx.Graph().placeholder("a"), Purpose("B", 0)
    row = [Works(purpose, 1.0), Starts(purpose, 3.0, 0, call, "dp", hidden=False), Works(purpose, 2.0)]
    (course,) = foreseen([[*row, Waits(purpose, 0, 0, call)]])
    assert course.exposed == 3.0 and tuple(course.spans[sx.Action("B", 0, 0)]) == (0.0, 6.0)


def test_who_sends_lays_out_and_who_receives_takes_in() -> None:
    call, forward, received = fx.Graph().placeholder("a"), Purpose("F", 0), Purpose("R")
    message = (0, 1, 0, 0)
    sender = [Works(forward, 1.0), Sends(forward, 4.0, 0, message, hidden=False), Works(forward, 1.0)]
    taker = [Receives(received, 0, 0, message, call), Waits(received, 0, 0, call), Works(Purpose("F", 1), 1.0)]
    first, second = foreseen([sender, taker])
    assert tuple(first.spans[sx.Action("F", 0, 0)]) == (0.0, 4.0) and first.exposed == 2.0
    assert tuple(second.spans[sx.Action("F", 1, 0)]) == (5.0, 6.0) and second.exposed == 2.0
