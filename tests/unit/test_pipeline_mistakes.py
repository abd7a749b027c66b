"""What users may say of a pipeline and cannot be: each is an error that says what, where, expected, got and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from tests.captures import captured_once

X, Y = torch.randn(8, 4), torch.randint(4, (8,))
MESH = sx.Mesh(pp=2, mb=sx.Loop(4))
TEXT = str(sx.schedules.make_schedule("1f1b", stages=2, microbatches=4))


def made(rows: object) -> Callable[..., Any]:
    return lambda stages, microbatches, ranks, costs: rows


def raises(stages: int, microbatches: int, ranks: int, costs: object) -> sx.schedules.Schedule:
    raise ZeroDivisionError("no micro-batches")


def planned(mesh: sx.Mesh = MESH, hints: dict[str, Any] | None = None, **pipeline: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    given = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), pipeline=sx.Pipeline(**pipeline), **(hints or {}))
    with captured_once("four blocks"):
        return sx.parallelize(model, mesh, given, virtual=True)


def refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(sx.Error) as caught:
        make()
    error = caught.value
    assert words in str(error), error
    assert all(part is not None for part in (error.where, error.expected, error.got, error.remedy)), error


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"axis": ""}, "the mesh has no axis '' of ranks"),
        ({"axis": None}, "Pipeline(axis=...) is of another kind"),
        ({"microbatches": None}, "Pipeline(microbatches=...) is of another kind"),
        ({"axis": "mb"}, "the mesh has no axis 'mb' of ranks"),
        ({"microbatches": "pp"}, "the mesh has no axis 'pp' of micro-batches"),
        ({"stages_per_rank": 0}, "Pipeline(stages_per_rank=...) is of another kind"),
        ({"stages_per_rank": True}, "Pipeline(stages_per_rank=...) is of another kind"),
        ({"stages_per_rank": 2}, "1f1b has 1 stage on each rank"),
        ({"stages_per_rank": 3, "schedule": "interleaved"}, "there are more stages than blocks: 6 and 4"),
        ({"stages": 2}, "Pipeline(stages=...) is of another kind"),
        ({"stages": "layers.1"}, "Pipeline(stages=...) is of another kind"),
        ({"stages": (1, 2)}, "another number of blocks than there are"),
        ({"stages": (1, 2, 1)}, "3 stages are described, where there are 2"),
        ({"stages": ("3", "2")}, "do not begin one behind the other"),
        ({"stages": ("9",)}, "no stage can begin at '9'"),
        ({"stages": (0, 4)}, "another number of blocks than there are"),
        ({"stages": (1, "2")}, "Pipeline(stages=...) is of another kind"),
        ({"stages": ((), ("**",))}, "stage 0 has nothing to do"),
        ({"stages": (("0", "1"), ("1", "2", "3"))}, "is in two stages"),
        ({"stages": (("0", "1"), ("2",))}, "is in no stage"),
        ({"stages": (("0", "2"), ("1", "3"))}, "stages need one another in a circle"),
        ({"max_in_flight": 0}, "Pipeline(max_in_flight=...) is of another kind"),
        ({"max_in_flight": 1, "schedule": TEXT}, "the schedule has more micro-batches in flight than may be"),
        ({"schedule": None}, "Pipeline(schedule=...) is of another kind"),
        ({"schedule": TEXT + "\nF2.0"}, "a schedule has a row for each rank"),
        ({"schedule": TEXT + " F1.3"}, "F1.3 stands twice"),
        ({"schedule": made(None)}, "a function makes no schedule"),
        ({"schedule": made(TEXT)}, "a function makes no schedule"),
        (
            {"schedule": made(sx.schedules.make_schedule("1f1b", stages=3, microbatches=4))},
            "a schedule has a row for each rank",
        ),
        ({"schedule": "auto", "hints": {"memory": 100}}, "no schedule fits into what a rank may hold"),
        ({"hints": {"specs": {"3.0.weight": "pp, -"}}}, "a value is sharded over 'pp', the axis of stages"),
        ({"hints": {"specs": {"3.0.weight": "mb, -"}}}, "a parameter is sharded over 'mb', a loop axis"),
        (
            {"hints": {"zero": 3, "zero_min_numel": 0, "zero_axis": "pp"}},
            "a value is sharded over 'pp', the axis of stages",
        ),
        ({"hints": {"zero": 3, "zero_min_numel": 0, "zero_axis": "mb"}}, "cannot be stored sharded over 'mb'"),
        ({"mesh": sx.Mesh(dp=2, mb=sx.Loop(4))}, "the mesh has no axis 'pp' of ranks"),
        ({"mesh": sx.Mesh(pp=2)}, "the mesh has no axis 'mb' of micro-batches"),
        ({"mesh": sx.Mesh(pp=2, mb=4)}, "the mesh has no axis 'mb' of micro-batches"),
        ({"mesh": sx.Mesh(pp=sx.Loop(2), mb=sx.Loop(4))}, "the mesh has no axis 'pp' of ranks"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_no_pipeline_can_be(pipeline: dict[str, Any], words: str) -> None:
    refused(lambda: planned(**pipeline), words)


def test_a_function_that_makes_no_schedule_is_named() -> None:
    with pytest.raises(sx.Error, match="pass 'pipeline' failed: ZeroDivisionError: no micro-batches"):
        planned(schedule=raises)
