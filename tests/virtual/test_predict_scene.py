"""Scenes that are computed window by window: the result is that of the model on the whole scene."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.virtual.test_space import UNet, image

MESH = sx.Mesh(h=2, w=2)


class ConvNext(nn.Module):
    """Depthwise convolutions, and norms over channels that lie last."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.depth = nn.Conv2d(3, 6, 4, 4), nn.Conv2d(6, 6, 7, padding=3, groups=6)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        b, h, w, c = y.shape
        y = self.down(nn.functional.gelu(self.up(y.reshape(b, h * w, c)))).reshape(b, h, w, c)
        return nn.functional.pixel_shuffle(torch.cat([x + y.permute(0, 3, 1, 2)] * 2, 1), 2)


NETS: dict[str, Callable[[], nn.Module]] = {
    "convnext": ConvNext,
    "pools": lambda: nn.Sequential(
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.Conv2d(3, 4, 3, padding=2, dilation=2),
        nn.ConvTranspose2d(4, 3, 3, 2, 1, 1),
        nn.ZeroPad2d((1, 2, 0, 3)),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ),
    "mirrors": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2, padding_mode="reflect"), nn.Conv2d(4, 3, 3, padding=1, padding_mode="replicate")
    ),
    "other scales": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.Upsample(scale_factor=1.5, mode="bicubic"), nn.PixelUnshuffle(3)
    ),
}


def trained(model: nn.Module, height: int = 40, width: int = 36) -> nn.Module:
    """The model in float64, its norms with statistics of something."""
    model = model.double()
    with torch.no_grad():
        for _ in range(3):
            model(image(2, 3, height, width))
    return model.eval()


def planned(model: nn.Module, *sizes: int, batch: int = 1, mesh: sx.Mesh = MESH) -> sx.ParallelModule:
    x = torch.zeros(batch, 3, *sizes, dtype=torch.float64)
    sharding = ["dp", "-", "h", "w", "d"][: x.ndim]
    specs = {"args.0": ", ".join(axis if axis in mesh.names else "-" for axis in sharding)}
    mode = model.training
    return sx.parallelize(model.train(), mesh, sx.Hints(args=(x,), specs=specs), virtual=True).train(mode)


def check(model: nn.Module, pm: sx.ParallelModule, scene: Tensor, window: Sequence[int] | None = None) -> None:
    with torch.no_grad():
        whole = model(scene[None])[0]
    out = np.full(whole.shape, np.nan)
    sx.images.predict_scene(pm, scene.numpy(), out, window=window, progress=False)
    torch.testing.assert_close(torch.from_numpy(out), whole, rtol=1e-9, atol=1e-9)


CASES: list[tuple[str, tuple[int, int], tuple[int, int]]] = [
    ("convnext", (48, 40), (104, 88)),
    ("pools", (36, 40), (91, 90)),
    ("mirrors", (33, 40), (70, 53)),
    ("other scales", (57, 65), (121, 137)),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "window", "scene"), CASES, ids=[case[0] for case in CASES])
def test_a_scene_is_as_the_whole(name: str, window: tuple[int, int], scene: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = trained(NETS[name](), *window)
    check(model, planned(model, *window), image(3, *scene))


@pytest.mark.long
def test_windows_of_several_sizes_and_scenes_of_several() -> None:
    torch.manual_seed(0)
    model = trained(UNet())
    pm = planned(model, 32, 40)
    check(model, pm, image(3, 20, 100))
    check(model, pm, image(3, 100, 56), window=(64, 56))


def test_windows_of_a_volume_fill_a_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(3, 2, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(2, 1, 3, padding=1))
    model = model.double().eval()
    check(model, planned(model, 16, 18, 20, batch=3, mesh=sx.Mesh(dp=2, h=2)), image(3, 30, 18, 46))


@pytest.mark.long
def test_a_scene_goes_on_where_it_was(tmp_path: Path) -> None:
    class Ends:
        """An array that fails after some writes."""

        def __init__(self, array: Any, after: int) -> None:
            self.array, self.shape, self.after, self.flushed = array, array.shape, after, 0

        def __setitem__(self, window: Any, value: Any) -> None:
            if self.after == 0:
                raise OSError("no space is left")
            self.after -= 1
            self.array[window] = value

        def flush(self) -> None:
            self.flushed += 1

    torch.manual_seed(0)
    model = trained(UNet())
    pm, scene, state = planned(model, 40, 40), image(3, 100, 40), tmp_path / "state.json"
    out = np.zeros((2, 100, 40))
    broken = Ends(out, 2)
    with pytest.raises(OSError, match="no space is left"):
        sx.images.predict_scene(pm, scene, broken, state=state, progress=False)
    assert broken.flushed == 2 and len(state.read_text().splitlines()) == 4
    state.write_text(state.read_text() + "[7")  # as if it was ended while it was written
    rest = Ends(out, 100)
    sx.images.predict_scene(pm, scene, rest, state=state)
    with torch.no_grad():
        np.testing.assert_allclose(out, model(scene[None])[0], rtol=1e-9, atol=1e-9)
    again = Ends(out, 0)
    sx.images.predict_scene(pm, scene, again, state=state, progress=False)
    assert again.flushed == 0 and rest.flushed == 100 - rest.after
    with pytest.raises(sx.Error, match="the state is of another run: window differs"):
        sx.images.predict_scene(pm, scene, out, state=state, window=(60, 40), progress=False)
    pm.load_full_state_dict({name: t + 1 for name, t in pm.full_state_dict().items()})
    with pytest.raises(sx.Error, match="the state is of another run: weights differs"):
        sx.images.predict_scene(pm, scene, out, state=state, progress=False)


# ---- what is not local -------------------------------------------------------------------------------------


class Places(nn.Module):
    """A value of its own for each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linspace(0, 1, x.shape[-2], dtype=x.dtype)[:, None]


class Squeeze(nn.Module):
    """A global pool that scales channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


class Counts(nn.Module):
    """A number that is made of the size."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.tensor(x.shape[2])


NOT_LOCAL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "global pool": (Squeeze, r"mean.* is not local: it combines all positions of the image"),
    "batch norm in training": (lambda: nn.BatchNorm2d(3).train(), "batch_norm.* is not local: it needs all rows"),
    "corners that are aligned": (
        lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        "upsample_bilinear2d is not local: it makes rows of others, in a larger image",
    ),
    "places": (Places, "is not local: it"),
    "dropout": (lambda: nn.Dropout().train(), "random numbers are drawn by position"),
    "a size": (Counts, "is not local"),
}


class Masks(nn.Module):
    """Something that is the same at all places, made for the size of the image."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.full(x.shape[2:], 0.5, dtype=x.dtype) + torch.ones_like(x[:, :1]).expand(x.shape)


@pytest.mark.long
@pytest.mark.parametrize("name", NOT_LOCAL)
def test_what_is_not_local_is_named(name: str) -> None:
    make, said = NOT_LOCAL[name]
    model = make().double()
    if "train" not in name and name != "dropout":
        model.eval()
    pm = planned(model, 24, 24, mesh=sx.Mesh(dp=2), batch=2)
    with torch.no_grad():
        out = np.zeros(model(torch.zeros(2, 3, 48, 40, dtype=torch.float64)).shape[1:])
    with pytest.raises(sx.Error, match=said):
        sx.images.predict_scene(pm, image(3, 48, 40), out, progress=False)


def test_what_is_alike_at_all_places_is_local() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Masks()).double()
    check(model, planned(model, 24, 24, mesh=sx.Mesh(h=2)), image(3, 60, 40))


def test_what_takes_the_whole_dim_may_do_so_where_windows_have_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), Turned()).double()
    check(model, planned(model, 24, 24, mesh=sx.Mesh(h=2)), image(3, 60, 24))


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(3).softmax(3) - x.mean(3, keepdim=True)


@pytest.mark.long
def test_bad_input(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pm = planned(trained(UNet()), 40, 40)
    scene, out = image(3, 80, 80), np.zeros((2, 80, 80))
    with pytest.raises(sx.Error, match="the window is too small") as caught:
        sx.images.predict_scene(pm, scene, out, window=(20, 40), progress=False)
    assert "the margin is 10 on each side" in str(caught.value)
    with pytest.raises(sx.Error, match="out is of another shape") as caught:
        sx.images.predict_scene(pm, scene, np.zeros((3, 80, 80)), progress=False)
    assert "(2, 80, 80)" in str(caught.value)
    with pytest.raises(sx.Error, match="no image that the model takes"):
        sx.images.predict_scene(pm, image(4, 80, 80), out, progress=False)
    with pytest.raises(sx.Error, match="which of the model's results is meant"):
        sx.images.predict_scene(pm, scene, out, result="results.1", progress=False)
    broken = tmp_path / "state.json"
    for text in ("", '{"scene":\n', "[1]\n7\n"):
        broken.write_text(text)
        with pytest.raises(sx.Error, match="no state of a run"):
            sx.images.predict_scene(pm, scene, out, state=broken, progress=False)
    with pytest.raises(sx.Error, match="no folder for the state"):
        sx.images.predict_scene(pm, scene, out, state=tmp_path / "none" / "state.json", progress=False)
    with pytest.raises(sx.Error, match="cannot be captured"):
        sx.images.predict_scene(pm, image(3, 81, 80), np.zeros((2, 81, 80)), progress=False)
