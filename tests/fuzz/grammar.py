"""The layers that random models are made of: text of a module that takes ``y: [batch, time, dim]`` and keeps that rank.

A layer is drawn as its kind and a few numbers, and written for the sizes that come in.
"""

from __future__ import annotations

from . import computing_layers, moving_layers, stateful_layers, strided_layers
from .shards import Kind

FIRST = sorted([*computing_layers.KINDS, *moving_layers.KINDS])
"""The names that seeds draw the layers of a model from, in this order."""
LATER = sorted([*stateful_layers.KINDS, *strided_layers.KINDS])
"""Those that some seeds draw beside these, each by itself: so earlier cases stay what they are."""
KINDS: dict[str, Kind] = {
    **computing_layers.KINDS,
    **moving_layers.KINDS,
    **stateful_layers.KINDS,
    **strided_layers.KINDS,
}
"""By name."""
