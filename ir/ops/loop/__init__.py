"""Ops of loop axes and of pipelines."""
