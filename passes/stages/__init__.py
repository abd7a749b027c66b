"""Passes that split a graph into the stages of a pipeline."""

from .pipeline_pass import Pipeline
from .stage_blocks import Found, stages_as_planned

__all__ = ["Found", "Pipeline", "stages_as_planned"]
