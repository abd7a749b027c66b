"""Models of diffusers, each made tiny by its options and random, with inputs by hand.

A name is that of a class; behind a colon stands which of its forms it is.
"""

from __future__ import annotations

import diffusers
import torch

from benchmarks.survey.diffusers_autoencoders import AUTOENCODERS
from benchmarks.survey.diffusers_transformers import TRANSFORMERS
from benchmarks.survey.diffusers_unets import UNETS
from benchmarks.survey.diffusers_videos import VIDEOS
from benchmarks.survey.samples import Sample, in_float64, without_chance

CASES = {**UNETS, **AUTOENCODERS, **TRANSFORMERS, **VIDEOS}
NAMES = list(CASES)
FLOAT32 = (
    """AutoencoderTiny CosmosTransformer3DModel Kandinsky5Transformer3DModel MotifVideoTransformer3DModel""".split()
)
"""Classes that do not take float64: some constant of theirs is float32."""


def sample(name: str) -> Sample:
    """A model of a class, random, in float64, and inputs for it. What begins as zeros is random too."""
    options, inputs = CASES[name]
    torch.manual_seed(0)
    model = getattr(diffusers, name.partition(":")[0])(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    model = without_chance(model)
    return Sample(model, inputs()) if name in FLOAT32 else in_float64(model, inputs())
