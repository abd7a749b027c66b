"""Passes that cut a graph into the stages of a pipeline."""

from .stage_blocks import first_blocks
from .pipeline_pass import Pipeline

__all__ = ["Pipeline", "first_blocks"]
