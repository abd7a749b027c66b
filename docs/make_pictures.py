"""Draw the pictures of the README and of docs/: ``python docs/make_pictures.py``.

docs/pictures/block.svg      the forward pass of two GPT blocks, folded, without title and legend
docs/pictures/training.svg   one training step of examples/gpt_megatron.py
docs/pictures/schedule.svg   a schedule of a pipeline, simulated
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.visualize import draw_graph

ROOT = Path(__file__).parents[1]
MESH = sx.Mesh(dp=2, tp=2)


class Blocks(nn.Module):
    """Blocks of the example, without the biases of their Linears: few enough boxes for a page."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(block(), block())
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bias = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def main(folder: Path) -> list[Path]:
    """Draw the pictures into ``folder``; gives their paths."""
    example = runpy.run_path(str(ROOT / "examples" / "gpt_megatron.py"))
    specs = {name: spec for name, spec in example["SPECS"].items() if name.startswith("layers.")}
    x = torch.randn(example["BATCH"], example["LENGTH"], example["DIM"])
    blocks = sx.Hints(args=(x,), specs={"args.0": "dp, tp, -", **specs})
    forward = sx.parallelize(Blocks(example["Block"]), MESH, blocks, virtual=True)
    model, hints = example["make"]()
    training = sx.parallelize(model, MESH, hints, virtual=True)
    schedule = sx.schedules.simulate(sx.schedules.make_schedule("zb-v", stages=8, microbatches=9))
    title = "One training step of a GPT with Megatron's shardings"
    return [
        draw_graph(forward.planned, folder / "block.svg", "Two GPT blocks on dp=2 x tp=2", boxes=28, header=False),
        draw_graph(training.planned, folder / "training.svg", title),
        schedule.draw(folder / "schedule.svg", "zb-v on four ranks"),
    ]


if __name__ == "__main__":
    for path in main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"):
        print(path)
