"""Mutation test of ``pm.verify()``: the share of damaged programs that it refutes.

    python -m benchmarks.mutants [--count 2] [--plans mlp3@dp2tp2 ...] [--survivors] [--sound 100] [--processes 2]

Every kind of damage of ``tests.mutants`` is done at up to ``count`` places of every plan; then all of ``tests.wrong``
is asked: passes that change a plan, wrong rules, programs that are none, and damage on one rank of 64. The table gives,
by kind, how many programs were damaged and how many of them the static proof and the dynamic comparison refuse. With
``--sound`` so many programs of random models, meshes and hints that equal one device's are asked about, too.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch

import shardfx as sx
from shardfx.ir.program.plain import plain
from shardfx.runtime.verify.numeric_check import compare
from shardfx.runtime.verify.plan_proof import malformed
from shardfx.runtime.verify.proof.calls import Proof
from shardfx.runtime.verify.proof.collective_matching import interpret
from tests.damage import MUTATIONS, Mutation
from tests.fuzz.case import SHARE, draw
from tests.fuzz.check import check, sharing
from tests.mutants import AS_THEY_RUN, Programs
from tests.plans import MESHES, plan
from tests.wrong.questions import SECTIONS, Question, refused
from tests.zoo import make
from tests.zoo.cases import Case, double

PLANS = (
    "mlp3@dp2tp2",
    "mlp3@dp2tp2+whole-bias",
    "dropout_mlp@dp2tp2",
    "gpt_fused@tp2",
    "gpt_fused@tp2+again",
    "gpt_fused@dp2tp2+sequence",
    "mlp3@dp2tp2+both-axes",
    "gpt_fused@dp2tp2+whole-qkv",
    "llama@tp2",
    "resnet@dp2",
    "hf_gpt2@dp2tp2+alone",
)
STEPPED = (
    "mlp3@dp2tp2+AdamW",
    "few_rows@dp3tp2+Adafactor",
    "few_rows@2x2x2+clip+across",
    "mlp3@dp2tp2+AdamW+away",
    "gpt_separate@dp2+AdamW+rows",
)
"""Whole steps (one with parameters, states and activations offloaded, one with a table in host memory), and norms
of few rows on many ranks: random numbers do not tell a small term of these from none, and the proof does."""
UNEVEN = {"dp3tp2": sx.Mesh(dp=3, tp=2)}
SPECS = {
    "whole-bias": {"fc1.bias": "-"},
    "both-axes": {"args.0": "dp tp, -", "targets.0": "-", "fc1.weight": "-, -", "fc1.bias": "-", "fc2.weight": "-, -"},
    "whole-qkv": {"layers.*.qkv.bias": "-"},
    "across": {"weight": "dp, tp", "bias": "dp cp tp"},
}
"""Hints by the word behind a plan's name: each rank slices what is replicated."""


@dataclass
class Rates:
    """Per kind: damaged programs, and those refused by each."""

    made: Counter[str] = field(default_factory=Counter)
    static: Counter[str] = field(default_factory=Counter)
    dynamic: Counter[str] = field(default_factory=Counter)
    survivors: list[str] = field(default_factory=list)

    def add(self, other: Rates) -> None:
        """Count another's as well."""
        self.made += other.made
        self.static += other.static
        self.dynamic += other.dynamic
        self.survivors += other.survivors

    @property
    def total(self) -> int:
        return self.made.total()

    def table(self) -> str:
        lines = [f"{'damage':<42}{'programs':>9}{'static':>9}{'dynamic':>9}"]
        for name, count in self.made.items():
            lines.append(f"{name:<42}{count:>9}{self.static[name]:>9}{self.dynamic[name]:>9}")
        static, dynamic = self.static.total(), self.dynamic.total()
        lines.append(f"{f'{len(self.made)} kinds':<42}{self.total:>9}{static:>9}{dynamic:>9}")
        share = f"static {static / max(self.total, 1):.1%}, dynamic {dynamic / max(self.total, 1):.1%}"
        return "\n".join([*lines, f"refused: {share}"])


def planned(name: str) -> sx.ParallelModule:
    """The plan of a name such as ``gpt_fused@tp2+sequence`` (``+alone``: no buckets, ``+AdamW``: full steps;
    ``+away``: all offloaded, ``+rows``: tables; ``+again``: recomputed blocks; others: :data:`SPECS`)."""
    case, _, rest = name.partition("@")
    mesh, *more = rest.split("+")
    made = few_rows() if case == "few_rows" else make(case)
    fuse: dict[str, object] = {"bucket_mb": 0} if "alone" in more else {}
    if "AdamW" in more:
        fuse |= {"optimizer": torch.optim.AdamW, "zero": 1, "zero_min_numel": 64, "clip_grad_norm": 0.1}
    fuse |= {"optimizer": torch.optim.Adafactor} if "Adafactor" in more else {}
    fuse |= {"clip_grad_norm": 0.1} if "clip" in more else {}
    fuse |= {"recompute": "layers.*"} if "again" in more else {}
    if "away" in more:
        fuse |= {"offload": (sx.Offload(prefetch=2, min_numel=0),)}
    fuse |= {"offload": (sx.Offload("rows", min_numel=0),)} if "rows" in more else {}
    specs = {name: spec for each in more for name, spec in SPECS.get(each, {}).items()}
    return plan(made, UNEVEN.get(mesh) or MESHES[mesh], "sequence" in more, specs=specs, **fuse)


def few_rows() -> Case:
    """A Linear of fewer rows than there are ranks: some have none, and others' sharding is ambiguous."""
    with double():
        x, y = torch.randn(6, 6), torch.randint(4, (6,))
        model = torch.nn.Linear(6, 4)
    return Case("few_rows", model, (x,), {}, torch.nn.functional.cross_entropy, (y,), {"weight": "dp tp, -"})


def measure(plans: Iterable[str], count: int, mutations: Iterable[Mutation] = (*MUTATIONS, *AS_THEY_RUN)) -> Rates:
    """Damage the programs of some plans and verify them."""
    rates = Rates()
    for name in plans:
        pm = planned(name)
        rules = pm._compiled.context.rules
        begun, known = Proof.begin(pm.captured, pm.planned, rules, pm.planned.outputs, {}), pm._state.known_inputs()
        assert isinstance(begun, Proof), begun
        forms = {form: Programs.of(pm, as_they_run=form) for form in (False, True)}
        for mutation in mutations:
            undamaged = forms[mutation in AS_THEY_RUN]
            own, inputs, outputs = undamaged.programs, undamaged.programs[0].inputs, undamaged.programs[0].outputs
            for place, damaged in undamaged.damaged(mutation, count):
                modules = {**own, **damaged}
                proof = shown = next(filter(None, map(malformed, modules.values())), None)
                if proof is None:
                    sound = {rank: plain(program) for rank, program in modules.items()}
                    proof = interpret(Proof.of(pm.planned, begun.universe, rules), sound, inputs, outputs)
                    shown, _ = compare(pm.captured, pm.planned, modules, inputs, outputs, known)
                rates.made[mutation.name] += 1
                rates.static[mutation.name] += proof is not None
                rates.dynamic[mutation.name] += shown is not None
                missed = [how for how, fault in (("static", proof), ("dynamic", shown)) if fault is None]
                if missed:
                    rates.survivors.append(f"{name}: {mutation.name} at {place}: not seen by {' and '.join(missed)}")
    return rates


def ask(asked: Iterable[Question]) -> Rates:
    """Ask everything that is no damage to the calls of all ranks."""
    rates = Rates()
    for question in asked:
        static, dynamic = (refused(question, run) for run in (False, True))
        rates.made[question.kind] += 1
        rates.static[question.kind] += static
        rates.dynamic[question.kind] += dynamic
        missed = [how for how, seen in (("static", static), ("dynamic", dynamic)) if not seen]
        if missed:
            rates.survivors.append(f"{question.kind}: {question.what}: not seen by {' and '.join(missed)}")
    return rates


def alarms(seeds: Iterable[int]) -> tuple[int, list[str]]:
    """How many random cases equal one device, and which of them are not proven."""
    with sharing() as captures:
        outcomes = {seed: check(draw(seed), captures, verify=True) for seed in seeds}
    equal = sum(outcome.result == "equal" for outcome in outcomes.values())
    return equal, [f"seed {seed}: {outcome.alarm}" for seed, outcome in outcomes.items() if outcome.alarm]


def one(task: tuple[str, int]) -> Rates:
    """The rates of a plan, or of a kind of questions."""
    warnings.simplefilter("ignore")
    name, count = task
    rates = ask(SECTIONS[name]()) if name in SECTIONS else measure([name], count)
    print(f"{name}: {rates.total}, of which {len(rates.survivors)} were not refused by both", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2, help="places per kind of damage and plan")
    every = (*PLANS, *STEPPED, *SECTIONS)
    parser.add_argument("--plans", nargs="*", default=every, metavar="PLAN", help="or kinds of questions")
    parser.add_argument("--survivors", action="store_true", help="name the damaged programs that were not refused")
    parser.add_argument("--sound", type=int, default=0, metavar="N", help="ask about N sound programs, too")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    rates = Rates()
    with get_context("spawn").Pool(args.processes) as pool:
        for found in pool.imap(one, [(name, args.count) for name in args.plans], chunksize=1):
            rates.add(found)
        print(rates.table())
        if args.survivors:
            print("\n".join(rates.survivors))
        parts = [range(first, min(first + SHARE, args.sound)) for first in range(0, args.sound, SHARE)]
        equal, alarmed = 0, list[str]()
        for count, found_alarms in pool.imap(alarms, parts, chunksize=1):
            equal, alarmed = equal + count, alarmed + found_alarms
        if args.sound:
            print(f"{equal} sound programs of {args.sound} random cases, {len(alarmed)} of them not proven")
            print("\n".join(alarmed))


if __name__ == "__main__":
    main()
