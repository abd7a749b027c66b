"""A stub of torchvision for timm's imports, where it is not installed: names alone, as its models do not use them.

torchvision's builds are bound to builds of torch, and there is none for each of these. A class that a model would
need (``FrozenBatchNorm2d``, by an option that the survey does not take) cannot be made here.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets")
"""The modules of it that timm imports."""


class InterpolationMode(enum.Enum):
    """Ways to resize an image, of which timm makes a table when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Absent:
    """In place of every other class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is torchvision's: pip install torchvision")


class StandIn(ModuleType):
    """A module that has whatever class it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Absent,), {})


def install() -> None:
    """Put the modules where imports find them, unless torchvision is there."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in NAMES:
        module = StandIn(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__path__ = []
        sys.modules[module.__name__] = module
        above, _, own = module.__name__.rpartition(".")
        if above:
            setattr(sys.modules[above], own, module)
    sys.modules["torchvision.transforms.functional"].InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
