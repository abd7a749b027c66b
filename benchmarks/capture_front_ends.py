"""The graphs that Dynamo and ``torch.export`` give of unedited transformers models, tiny and random, node for node.

    python -m benchmarks.capture_front_ends [names ...]

One line each: same, other (how many nodes by export, and by Dynamo), refused by one of them or by both (with the error
of Dynamo's), and the seconds of both. Paths of modules are compared; source lines
are not, as those of Dynamo are of the innermost function.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

import shardfx as sx
from benchmarks.model_survey import first_line, loss, results
from benchmarks.survey.of_transformers import NAMES, sample
from shardfx.ir.capture.frontend.dynamo import TracedCall, trace_call
from shardfx.ir.capture.frontend.model_preparation import without_weights
from shardfx.ir.capture.trace import capture
from shardfx.ir.graph import Graph
from shardfx.ir.text import print_graph
from shardfx.ir.unfolding.unfold import unfolded


def without_lines(graph: Graph) -> str:
    """The text of a graph with the paths of modules, and without source lines."""
    return re.sub(r"^source .*\n| +\S+\.py:\d+", "", print_graph(graph), flags=re.MULTILINE)


def captured(model: nn.Module, by_dynamo: bool, **how: Any) -> tuple[Graph | Exception, float]:
    """The graph of a model, or why there is none, and the seconds that it took."""
    begun = time.perf_counter()
    try:
        call = TracedCall(without_weights(model), loss, (), how["kwargs"], how["targets"])
        found = trace_call(call) if by_dynamo else None
        made: Graph | Exception = unfolded(capture(model, sx.Mesh(dp=2), loss=loss, found=found, **how).graph)
    except Exception as error:
        made = error
    return made, time.perf_counter() - begun


def verdict(name: str) -> tuple[str, str]:
    """What comes of one model: a word, and the rest."""
    torch.manual_seed(0)
    made = sample(name)
    try:
        wanted = torch.randn_like(results(sample(name).model(**made.kwargs))[0])  # another one: it may keep tensors
    except Exception as error:
        return "not run", first_line(error)
    how = {"kwargs": made.kwargs, "targets": (wanted,)}
    exported, first = captured(made.model, False, **how)
    traced, second = captured(made.model, True, **how)
    took = f"{first:.1f} and {second:.1f} s"
    if isinstance(traced, Exception):
        who = "both" if isinstance(exported, Exception) else "Dynamo"
        return f"refused by {who}", f"{took}  {first_line(traced)}"
    if isinstance(exported, Exception):
        return "refused by export", f"{took}  {first_line(exported)}"
    same = without_lines(exported) == without_lines(traced)
    return ("same", took) if same else ("other", f"{took}  {len(exported.nodes)} and {len(traced.nodes)} nodes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    count: Counter[str] = Counter()
    for name in parser.parse_args().names or NAMES:
        word, rest = verdict(name)
        count[word] += 1
        print(f"{name:28} {word:18} {rest}", flush=True)
    print(", ".join(f"{number} {word}" for word, number in count.items()))


if __name__ == "__main__":
    main()
