"""An example under torch's own elastic agent, as ``torchrun`` starts it, in ranks that are forked."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed.run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import shardfx as sx
from tests.printed import check_printed, noting_programs

from .fork import remember_plans


def rank_main(path: str, *arguments: str) -> None:
    """Run the example as a rank: its plan ran what it prints."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    with noting_programs() as ran:
        scope = runpy.run_path(path, run_name="__main__")
    check_printed(scope["pm"], ran)


def forked(config: LaunchConfig, entrypoint: str) -> Callable[..., Any]:
    """In the place of torchrun's own start of ``python -u PATH ARGUMENTS``."""
    return lambda _, *call: elastic_launch(replace(config, start_method="fork"), rank_main)(*call)


def main(arguments: list[str]) -> int:
    """``arguments`` are those of torchrun; the example's plan is made here, once."""
    remember_plans()
    path = next(each for each in arguments if each.endswith(".py"))
    model, hints = runpy.run_path(os.path.join(os.path.dirname(path), "gpt_megatron.py"))["make"]()
    sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints, virtual=True)
    torch.distributed.run.elastic_launch = forked  # type: ignore[assignment]
    torch.distributed.run.main(arguments)
    return 0
