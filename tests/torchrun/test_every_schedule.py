"""Every schedule on real processes (gloo): what one device computes; and the same through ``torch.compile``."""

from __future__ import annotations

import pytest

from tests.deep import CHUNKS
from tests.torchrun.launch import on_ranks

pytestmark = pytest.mark.slow
MODELS = ("gpt", "llama", "t5", "resnet", "unet")
EVERY = ",".join(CHUNKS)
TOGETHER = (
    ("pp2dp2", "", "1f1b,zb-v"),
    ("dp2pp2", "zero3", "interleaved,zb-h1"),
    ("pp2dp2", "zero1", "dualpipev,gpipe"),
    ("pp2tp2", "", "zb-h2,breadth-first"),
    ("pp2tp2", "recompute", "1f1b,zb-v"),
    ("pp2dp2", "zero3 recompute", "breadth-first,zb-h2"),
)
"""Other axes and features, each with schedules of its own."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_on_real_ranks(name: str, ranks: int) -> None:
    on_ranks(ranks, f"stages_are_the_whole_batch:{name},pp{ranks},,{EVERY}", timeout=400)


@pytest.mark.parametrize("name", MODELS)
def test_schedules_go_with_other_axes_on_real_ranks(name: str) -> None:
    calls = [f"stages_are_the_whole_batch:{name},{mesh},{how},{schedules}" for mesh, how, schedules in TOGETHER]
    on_ranks(4, *calls, timeout=400)


def test_compiled_stages_by_every_schedule() -> None:
    calls = (f"compiled_stages_{how}:eager,mlp,pp2,,{EVERY}" for how in ("on_gloo", "are_the_same"))
    on_ranks(2, *calls, "compiled_steps_are_the_same:eager,pp2,,zb-v", timeout=400)


def test_compiled_stages_on_four_ranks() -> None:
    on_ranks(
        4,
        f"compiled_stages_on_gloo:eager,mlp,pp4,,{EVERY}",
        "compiled_stages_are_the_same:aot_eager,mlp,pp2tp2,,1f1b,zb-v",
        "compiled_stages_are_the_same:aot_eager,mlp,pp2dp2,zero3,interleaved,zb-h1",
        "compiled_steps_are_the_same:aot_eager,dp2pp2,zero1,1f1b",
        timeout=400,
    )


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_compiled_models_in_stages(name: str) -> None:
    on_ranks(2, f"compiled_stages_on_gloo:inductor,{name},pp2,,1f1b", timeout=400)
