"""``python -m tests.fuzz``: see ``--help``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from multiprocessing import get_context

import torch

from .case import SHARE, draw
from .check import Outcome, check, sharing


def run(task: tuple[int, int, int]) -> list[tuple[int, Outcome]]:
    """The outcomes of the seeds from ``first``; every ``share``-th is verified, too."""
    first, count, share = task
    torch.set_num_threads(1)
    with sharing() as captures:
        return [(s, check(draw(s), captures, share > 0 and s % share == 0)) for s in range(first, first + count)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run one seed, and print it as a script")
    parser.add_argument("--verify", type=int, default=8, metavar="N", help="verify every Nth case, too; 0 for none")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long, whatever --cases says")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    first, count = (options.seed, options.cases) if options.only is None else (options.only, 1)
    tasks = [(s, min(5 * SHARE, first + count - s), options.verify) for s in range(first, first + count, 5 * SHARE)]
    started, outcomes = time.monotonic(), {}
    with get_context("fork").Pool(min(options.processes, len(tasks))) as pool:
        for chunk in pool.imap_unordered(run, tasks):
            for seed, outcome in chunk:
                outcomes[seed] = outcome
                if outcome.result == "failed":
                    print(f"seed {seed}: {outcome.kind}\n    {outcome.text[:600]}", flush=True)
                if outcome.alarm:
                    print(f"seed {seed}: equal, and NOT VERIFIED\n    {outcome.alarm[:600]}", flush=True)
            if len(outcomes) % (50 * SHARE) == 0:
                print(f"{len(outcomes)} of {count}, {time.monotonic() - started:.0f} s", flush=True)
            if time.monotonic() - started > 60 * options.minutes:
                break
    took = time.monotonic() - started
    if options.only is not None:
        print(outcomes[options.only], draw(options.only).script(), sep="\n")
    results = Counter(outcome.result for outcome in outcomes.values())
    alarms = sum(bool(outcome.alarm) for outcome in outcomes.values())
    print(f"{len(outcomes)} cases in {took:.0f} s: {dict(results)}; {alarms} equal and not verified")
    for kind, many in Counter(o.kind for o in outcomes.values() if o.result == "refused").most_common():
        print(f"  refused {many}: {kind}")
    failed: dict[str, list[int]] = {}
    for seed in sorted(seed for seed, outcome in outcomes.items() if outcome.result == "failed"):
        failed.setdefault(outcomes[seed].kind, []).append(seed)
    for kind, seeds in failed.items():
        print(f"  FAILED {len(seeds)}: {kind}: seeds {seeds[:20]}")
    return 1 if failed or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
