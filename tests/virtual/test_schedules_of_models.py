"""Every schedule, for every kind of model: loss, gradients and buffers of one device; and with the other axes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import shardfx as sx
from tests.deep import AGAIN, CHUNKS, alone, deep, in_stages, worst

slow = pytest.mark.slow
MODELS = ("gpt", "llama", "t5", "resnet", "unet")


def zero(level: int) -> dict[str, Any]:
    return {"zero": level, "zero_min_numel": 0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "schedule", "ranks"),
    [
        pytest.param(name, schedule, ranks, marks=() if (name, schedule, ranks) == ("gpt", "zb-h1", 2) else slow)
        for name, schedule, ranks in product(MODELS, (*CHUNKS, "auto"), (2, 3, 4))
    ],
)
def test_every_schedule_of_every_model(name: str, schedule: str, ranks: int) -> None:
    """Micro-batches are no multiple of the ranks, nor (but for batch norms) rows of the micro-batches."""
    microbatches, chunks = 2 * ranks + 1, CHUNKS.get(schedule, 1)
    case = deep(name, ranks * chunks, microbatches)
    mesh = sx.Mesh(pp=ranks, mb=sx.Loop(microbatches))
    pm = in_stages(case, mesh, pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=chunks))
    assert worst(pm, case, alone(case, microbatches)) < 1e-9
    assert pm.verify()


PAIRS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"tp": 2}, {}),
    "recompute": ({}, {}),
    "dp tp": ({"dp": 2, "tp": 2}, {}),
    "dp zero1": ({"dp": 2}, zero(1)),
    "dp zero2": ({"dp": 2}, zero(2)),
    "dp zero3": ({"dp": 2}, zero(3)),
    "dp recompute": ({"dp": 2}, {}),
    "tp zero3": ({"dp": 2, "tp": 2}, zero(3)),
    "tp recompute": ({"tp": 2}, {}),
    "zero1 recompute": ({"dp": 2}, zero(1)),
    "zero3 recompute": ({"dp": 2}, zero(3)),
}
PLACES = [(name, pair, i + j) for i, name in enumerate(MODELS) for j, pair in enumerate(PAIRS)]
CASES = [(name, pair, [*CHUNKS][place % len(CHUNKS)]) for name, pair, place in PLACES]
"""Each pair for each model, with all schedules in turn."""


@slow
@pytest.mark.parametrize(("name", "pair", "schedule"), CASES)
def test_pairs_of_axes_and_features(name: str, pair: str, schedule: str) -> None:
    axes, hints = PAIRS[pair]
    hints = hints | ({"recompute": AGAIN[name]} if "recompute" in pair else {})
    case, chunks = deep(name, 2 * CHUNKS[schedule], 5, axes.get("dp", 1)), CHUNKS[schedule]
    first = len(schedule) % 2  # stages are the outermost axis, or the innermost
    mesh = sx.Mesh(**({"pp": 2} | axes if first else axes | {"pp": 2}), mb=sx.Loop(5))
    pm = in_stages(case, mesh, pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=chunks), **hints)
    assert worst(pm, case, alone(case, 5)) < 1e-9
    assert pm.verify()


@slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(("level", "schedule"), [(0, "1f1b"), (1, "interleaved"), (2, "zb-h1"), (3, "zb-v")])
def test_all_of_it_at_once(name: str, level: int, schedule: str) -> None:
    """Data, tensor and sequence parallelism, shards, and blocks recomputed in the first stage alone."""
    case, chunks = deep(name, 2 * CHUNKS[schedule], 5, 2), CHUNKS[schedule]
    hints = {"pipeline": sx.Pipeline(schedule=schedule, stages_per_rank=chunks), "recompute": "layers.0"}
    pm = in_stages(case, sx.Mesh(dp=2, tp=2, pp=2, mb=sx.Loop(5)), True, **hints, **(zero(level) if level else {}))
    assert worst(pm, case, alone(case)) < 1e-9
    assert pm.verify()


@slow
@pytest.mark.parametrize("schedule", CHUNKS)
def test_activations_offloaded_by_every_schedule(schedule: str) -> None:
    case, chunks = deep("gpt", 2 * CHUNKS[schedule], 5), CHUNKS[schedule]
    away = sx.Offload(("activations",), min_numel=1)
    hints = {"pipeline": sx.Pipeline(schedule=schedule, stages_per_rank=chunks), "offload": (away,)}
    pm = in_stages(case, sx.Mesh(pp=2, mb=sx.Loop(5)), **hints)
    assert worst(pm, case, alone(case)) < 1e-9
    assert pm.verify()


@slow
@pytest.mark.parametrize("schedule", CHUNKS)
def test_tiles_by_every_schedule(schedule: str) -> None:
    case, chunks = deep("unet", 0, 5), CHUNKS[schedule]
    hints = sx.Hints(
        case.args,
        loss=case.loss,
        targets=case.targets,
        specs={"args.0": "mb, -, h, -", "targets.0": "mb, h, -"},
        pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=chunks),
    )
    pm = sx.parallelize(case.model, sx.Mesh(pp=2, h=2, mb=sx.Loop(5)), hints)
    assert worst(pm, case, alone(case)) < 1e-9
    assert pm.verify()
