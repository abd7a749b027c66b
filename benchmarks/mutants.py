"""How many damaged programs does ``pm.verify()`` notice?

    python -m benchmarks.mutants [--count 2] [--plans mlp3@dp2tp2 ...] [--survivors]

Every kind of damage of ``tests.mutants`` is done at up to ``count`` places of every plan; then all of ``tests.wrong``
is asked: passes that change a plan, wrong rules, programs that are none, and damage on one rank of 64. The table gives,
by kind, how many programs were damaged and how many of them the static proof and the dynamic comparison refuse.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import shardfx as sx
from shardfx.ir.program.plain import plain
from shardfx.runtime.verify.plan_proof import first_broken
from shardfx.runtime.verify.proof import every_rank
from shardfx.runtime.verify.proof.terms import build
from shardfx.runtime.verify.sample import compare
from tests.mutants import IN_PLACE, MUTATIONS, Mutation, Programs
from tests.plans import MESHES, plan
from tests.wrong.questions import Question, questions, refused
from tests.zoo import make

PLANS = (
    "mlp3@dp2tp2",
    "mlp3@dp2tp2+whole-bias",
    "dropout_mlp@dp2tp2",
    "gpt_fused@tp2",
    "gpt_fused@dp2tp2+sequence",
    "mlp3@dp2tp2+both-axes",
    "gpt_fused@dp2tp2+whole-qkv",
    "llama@tp2",
    "resnet@dp2",
    "hf_gpt2@dp2tp2+alone",
)
SPECS = {
    "whole-bias": {"fc1.bias": "-"},
    "both-axes": {"args.0": "dp tp, -", "targets.0": "-", "fc1.weight": "-, -", "fc1.bias": "-", "fc2.weight": "-, -"},
    "whole-qkv": {"layers.*.qkv.bias": "-"},
}
"""Hints by the word behind a plan's name: of what is whole each rank takes a slice."""


@dataclass
class Rates:
    """Per kind: damaged programs, and those refused by each."""

    made: Counter[str] = field(default_factory=Counter)
    static: Counter[str] = field(default_factory=Counter)
    dynamic: Counter[str] = field(default_factory=Counter)
    survivors: list[str] = field(default_factory=list)

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
    """The plan of a name such as ``gpt_fused@tp2+sequence`` (``+alone``: no buckets; others: :data:`SPECS`)."""
    case, _, rest = name.partition("@")
    mesh, *more = rest.split("+")
    fuse = {"fuse_mb": 0} if "alone" in more else {}
    specs = {name: spec for each in more for name, spec in SPECS.get(each, {}).items()}
    return plan(make(case), MESHES[mesh], "sequence" in more, specs=specs, **fuse)


def measure(
    plans: Iterable[str], count: int, progress: bool = False, mutations: Iterable[Mutation] = (*MUTATIONS, *IN_PLACE)
) -> Rates:
    """Damage the programs of some plans and verify them; with ``progress`` say after each plan how many so far."""
    rates = Rates()
    for name in plans:
        pm = planned(name)
        rules = pm._compiled.context.rules
        universe, known = build(pm.before, pm.after, rules), pm.known_inputs()
        forms = {form: Programs.of(pm, as_they_run=form) for form in (False, True)}
        for mutation in mutations:
            undamaged = forms[mutation in IN_PLACE]
            own, inputs, outputs = undamaged.programs, undamaged.programs[0].inputs, undamaged.programs[0].outputs
            for place, damaged in undamaged.damaged(mutation, count):
                modules = {**own, **damaged}
                proof = shown = first_broken(modules.values())
                if proof is None:
                    sound = {rank: plain(program) for rank, program in modules.items()}
                    proof, _ = every_rank.verify(pm.before, pm.after, rules, sound, inputs, outputs, universe)
                    shown, _ = compare.verify(
                        pm.before, pm.after, rules, modules, own, inputs, outputs, known, locate=False
                    )
                rates.made[mutation.name] += 1
                rates.static[mutation.name] += proof is not None
                rates.dynamic[mutation.name] += shown is not None
                missed = [how for how, fault in (("static", proof), ("dynamic", shown)) if fault is None]
                if missed:
                    rates.survivors.append(f"{name}: {mutation.name} at {place}: not seen by {' and '.join(missed)}")
        if progress:
            print(f"{name}: {rates.total} so far, {len(rates.survivors)} not refused by both", flush=True)
    return rates


def ask(rates: Rates, asked: Iterable[Question]) -> None:
    """Ask everything that is no damage to the calls of all ranks."""
    for question in asked:
        static, dynamic = (refused(question, run) for run in (False, True))
        rates.made[question.kind] += 1
        rates.static[question.kind] += static
        rates.dynamic[question.kind] += dynamic
        missed = [how for how, seen in (("static", static), ("dynamic", dynamic)) if not seen]
        if missed:
            rates.survivors.append(f"{question.kind}: {question.what}: not seen by {' and '.join(missed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2, help="places per kind of damage and plan")
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--survivors", action="store_true", help="name the damaged programs that were not refused")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rates = measure(args.plans, args.count, progress=True)
    if args.plans is PLANS:
        ask(rates, questions())
    print(rates.table())
    if args.survivors:
        print("\n".join(rates.survivors))


if __name__ == "__main__":
    main()
