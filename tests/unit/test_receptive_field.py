"""Windows of a scene: rows that are said to be right are those of the whole, whatever ops the model is made of."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.images.receptive_field import SceneRows, follow
from shardfx.images.scene_inference import spans
from shardfx.ir.graph import Graph
from shardfx.plugins import all_rules

COLUMNS = 6


def layer(draw: random.Random) -> nn.Module:
    """An op that is local along the first dim of an image; the second one, of six columns, stays as it is."""
    kernel, stride, dilation = draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 2)
    reach = dilation * (kernel - 1)
    padding = draw.choice([0, reach // 2, reach])
    pool = {"stride": (stride, 1), "padding": (min(padding, kernel // 2), 0)}
    how: dict[str, object] = {"stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1)}
    more = draw.randint(0, stride - 1) if stride > 1 else 0
    up = {"output_padding": (more, 0), **how}
    return draw.choice(
        [
            lambda: nn.Conv2d(2, 2, (kernel, 1), **how),  # type: ignore[arg-type]
            lambda: nn.ConvTranspose2d(2, 2, (kernel, 1), **up),  # type: ignore[arg-type]
            lambda: nn.MaxPool2d((kernel, 1), ceil_mode=draw.random() < 0.5, **pool),
            lambda: nn.AvgPool2d((kernel, 1), ceil_mode=draw.random() < 0.5, count_include_pad=False, **pool),
            lambda: nn.Upsample(scale_factor=(draw.choice([2.0, 1.5, 0.5]), 1.0), mode="bilinear"),
            lambda: nn.Upsample(scale_factor=(draw.choice([2.0, 3.0]), 1.0), mode="nearest"),
            lambda: nn.ConstantPad2d((0, 0, draw.randint(0, 2), draw.randint(-1, 2)), 0.5),
        ]
    )()


class Branches(nn.Module):
    """Two ways of one scale, which are added."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        kernel = draw.choice([1, 3, 5, 7])
        self.a, self.b = nn.Conv2d(2, 2, (kernel, 1), padding=(kernel // 2, 0)), nn.Conv2d(2, 2, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) + self.b(x)


def right(seed: int) -> bool:
    """Whether windows of a random model make up the whole, which it checks; False where the model has none."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers = [Branches(draw) if draw.random() < 0.3 else layer(draw) for _ in range(draw.randint(1, 4))]
    model = nn.Sequential(*layers).double().eval()
    window, scene = draw.randint(30, 60), draw.randint(61, 150)

    def traced(rows: int) -> Graph:
        return sx.api.trace(model, sx.Hints(args=(torch.zeros(1, 2, rows, COLUMNS, dtype=torch.float64),)))

    try:
        found = follow(traced(window), traced(scene), all_rules(()), [2], "results.0")
        (rows,) = (part for part in found.dims if isinstance(part, SceneRows))
        sharding = spans(rows, window, scene, found.grid[2], 1)
        if sharding[-1].size != window:
            found = follow(traced(sharding[-1].size), traced(scene), all_rules(()), [2], "results.0")
        if found.ragged is not None:
            return False
    except sx.Error as error:
        known = ("is not local", "the window is too small", "cannot be captured")
        if not any(word in str(error) for word in known):
            raise
        return False
    x = torch.randn(1, 2, scene, COLUMNS, dtype=torch.float64)
    whole = model(x)
    made = torch.full_like(whole, torch.nan)
    for each in sharding:
        made[:, :, each.into] = model(x[:, :, each.first : each.first + each.size])[:, :, each.kept]
    torch.testing.assert_close(made, whole, rtol=1e-9, atol=1e-9, msg=lambda text: f"seed {seed}: {model}\n{text}")
    return True


@pytest.mark.long
def test_windows_of_random_models_make_up_the_whole() -> None:
    assert sum(right(seed) for seed in range(8)) > 4
