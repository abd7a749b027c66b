"""Passes that cut a graph into the stages of a pipeline."""

from .pipeline_pass import Pipeline
from .stage_blocks import first_blocks

__all__ = ["Pipeline", "first_blocks"]
