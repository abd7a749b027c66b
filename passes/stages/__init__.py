"""Passes that cut a graph into the stages of a pipeline."""

from .pipeline_pass import Pipeline

__all__ = ["Pipeline"]
