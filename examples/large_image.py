"""Land cover: a UNet and a ResNet with a feature pyramid on an image that is larger than a rank's budget.

python examples/large_image.py                               # 2 x 2 tiles on four virtual ranks, in this process
torchrun --nproc-per-node 4 examples/large_image.py unet     # the same on four real ones, of one model alone
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from terrain import CLASSES, Pyramid, UNet, terrain
from torch import nn
from torch.utils.data import DataLoader

import shardfx as sx

CROP, SCENE, BUDGET = (256, 256), (512, 448), 20_000_000
SPECS = {"args.0": "-, -, h, w", "targets.0": "-, h, w"}


def train(name: str, model: nn.Module) -> sx.ParallelModule:
    image, mask = terrain(*SCENE)
    example = {"args": (image[None, :, : CROP[0], : CROP[1]],), "targets": (mask[None, : CROP[0], : CROP[1]],)}
    hints = sx.Hints(**example, loss=F.cross_entropy, specs=SPECS)
    pm = sx.parallelize(model, sx.Mesh(h=2, w=2), replace(hints, memory=BUDGET))
    talks, data = (
        not pm._this_rank,
        sx.images.TileDataset([(image, mask)] * 8, pm, crop=CROP, augment=("hflip", "rot90")),
    )
    optimizer, sampler = torch.optim.Adam(pm.parameters(), lr=1e-2), data.sampler(seed=0)
    for x, y in DataLoader(data, data.batch_size, sampler=sampler):
        optimizer.zero_grad()
        loss = pm(x, y)
        loss.backward()
        optimizer.step()
        if talks:
            print(f"{name}  loss {loss.item():.5f}")
    pm.eval()
    out = torch.zeros(CLASSES, *SCENE)
    sx.images.predict_scene(pm, image, out, progress=False)
    if talks:
        alone = sx.parallelize(model, sx.Mesh(h=1, w=1), hints, virtual=True).memory().peak
        print(f"{name}  peak of a rank {pm.memory().peak} bytes of {BUDGET}, of one device {alone}")
        print(
            f"{name}  right at {(out.argmax(0) == mask).float().mean():.3f}",
            sx.images.draw_tiles(pm, f"out/{name}.svg"),
        )
    return pm


if __name__ == "__main__":
    torch.manual_seed(0)
    models = {"unet": UNet(), "pyramid": Pyramid()}
    for name in sys.argv[1:] or models:
        pm = train(name, models[name])
    if dist.is_initialized():
        dist.destroy_process_group()
