"""Passes that cut a graph into the stages of a pipeline."""

from .pipeline_pass import Pipeline
from .stage_blocks import stages_as_planned

__all__ = ["Pipeline", "stages_as_planned"]
