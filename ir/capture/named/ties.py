"""Tensors that a model has under several names: ``model.head.weight = model.embed.weight``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardfx.ir.graph import Graph


def aliases_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For every name the first name of the same tensor (itself, mostly)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def name_ties(graph: Graph, aliases: Mapping[str, str]) -> None:
    """Say on each input by which other names the model has it."""
    others: dict[str, list[str]] = {}
    for name, first in aliases.items():
        if name != first:
            others.setdefault(first, []).append(name)
    for given in graph.inputs:
        given.aliases = tuple(others.get(given.name, ()))
