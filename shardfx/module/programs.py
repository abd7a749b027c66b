"""The rank programs of a compiled model: lowered when asked for, changed by rank passes, proven, run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import fx

from shardfx.compile import Compiled, default_rank_passes, no_collection, with_more_room
from shardfx.gradients import product
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import Graph, InputKind, OutputKind
from shardfx.ir.program.lower import lower
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.rules.book import RuleBook
from shardfx.module.execution_target import CompileOptions, ExecutionTarget
from shardfx.module.rule_checks import with_rules
from shardfx.passes import WITH_ROOM
from shardfx.passes.rank import BUILT_IN, RankContext, RankPass, built_in, run_rank_passes
from shardfx.plugins import as_rank_passes
from shardfx.runtime.export_programs import write_rank, write_shared
from shardfx.runtime.step import Kinds, ProgramRunner
from shardfx.runtime.store import Store
from shardfx.runtime.verify.plan_proof import ProgramRequest
from shardfx.runtime.verify.verdict import Verdict, together, verify

TRAIN: Kinds = frozenset({OutputKind.LOSS, OutputKind.GRADIENT, OutputKind.BUFFER, OutputKind.ROWS})
LOSS: Kinds = frozenset({OutputKind.LOSS, OutputKind.BUFFER})
STEP: Kinds = frozenset({OutputKind.LOSS, OutputKind.BUFFER, OutputKind.PARAMETER, OutputKind.STATE})
"""The outputs of a full training step, which stores new parameters and states."""
INFER: Kinds = frozenset({OutputKind.RESULT, OutputKind.BUFFER})
PULL: Kinds = frozenset({OutputKind.GRADIENT, OutputKind.ROWS})
"""The outputs of the program behind given gradients of results (see :mod:`.grad_delivery`)."""
BESIDE: Kinds = frozenset({OutputKind.RESULT})
"""The kinds of outputs that ``with_results`` adds."""
NAMES = {
    "loss and gradients": TRAIN,
    "loss": LOSS,
    "a full step": STEP,
    "results": INFER,
    "gradients for given ones": PULL,
    "loss, gradients and results": TRAIN | BESIDE,
    "loss and results": LOSS | BESIDE,
    "a full step, and results": STEP | BESIDE,
}
"""The programs that a call may run."""
RUNS = {kinds: name for name, kinds in NAMES.items()} | {
    TRAIN: "a training step",
    LOSS: "the loss alone",
    INFER: "the model's results",
}
"""The description of a call, by its set of outputs."""
ROOM = "a step had more rows for experts or tables than there was room for; since then there is room for"
USUAL = (TRAIN, LOSS, STEP, INFER)
"""The sets of outputs that any call may run; others are requested explicitly."""


def usual_kinds(compiled: Compiled, training: bool | None = None) -> Kinds:
    """The default output kinds: of training (by default where there is a loss), with the optimizer's step if it is in
    the plan; or of inference."""
    trains = compiled.trains if training is None else training
    return INFER if not trains else TRAIN if compiled.captured.update is None else STEP


def program_of(
    context: RankContext, rank: int, kinds: Kinds, rules: RuleBook, passes: Sequence[RankPass]
) -> RankProgram:
    """Lower the program of a rank from the context's graph, and run the rank passes.

    What somebody's own pass leaves is validated behind each pass; what built-in ones leave, at the end.
    """
    device, common = torch.device(context.device), context.common(kinds)
    program = lower(context.graph, rank, rules, kinds, device, common=common)
    ours = all(type(each) in BUILT_IN.values() for each in passes)
    return run_rank_passes(program, passes, context, not ours)


class Programs:
    """The rank programs of one compiled model, on a store."""

    def __init__(
        self, compiled: Compiled, target: ExecutionTarget, store: Store, options: CompileOptions | None = None
    ) -> None:
        self.compiled, self.target, self.device = compiled, target, target.device.type
        self.rank_passes = tuple(default_rank_passes(compiled.hints, self.device))
        self.step = ProgramRunner(compiled.after, self.program, store, lambda: target.make_engine(compiled.after))
        self.step.more_room = self._with_more_room
        inputs = (*compiled.after.of_kind(InputKind.ARGUMENT), *compiled.after.of_kind(InputKind.TARGET))
        self.call_inputs = {inp.name: inp for inp in inputs}
        self.notes: dict[str, None] = {}
        """The notes of rank passes, each once."""
        self.pulls = compiled.hints.loss is product
        """Whether the plan is for given gradients of the results."""
        self.unproven: set[int] = set()
        """Ranks that run programs which nobody has proven."""
        self.larger: Programs | None = None
        """Those that run in their place, with more room for the rows of experts."""
        if options is not None:
            self.compile(options)

    def compile(self, options: CompileOptions) -> None:
        """Run the programs through ``torch.compile`` from now on, which plans memory itself."""
        user = as_rank_passes(self.compiled.hints.rank_passes)
        self.rank_passes = (*built_in(self.device, compiled=True), *user)
        self.step.renew(lambda: self.target.make_compiled(self.compiled.after, options))

    def of(self, compiled: Compiled) -> Programs:
        """The programs of another plan, for inspection."""
        made = Programs(compiled, self.target, self.step.store)
        made.rank_passes = self.rank_passes
        return made

    def _with_more_room(self) -> ProgramRunner:
        """The runner of the same plan, with more room for the rows of experts.

        Raises:
            Error: the user's programs would have to run with more room.
        """
        if self.step.changed:
            raise Error(
                "programs that pm.use(...) put in have no room for all rows",
                where="pm(...)",
                remedy="plan with a larger capacity (sx.Experts, EmbeddingTables), and change its programs",
            )
        compiled = with_more_room(self.compiled)
        room = next(each.room for each in compiled.passes if isinstance(each, WITH_ROOM))
        self.notes[f"{ROOM} {'twice the mean' if room == 1 else 'all rows'}"] = None
        self.larger = self.of(compiled)
        self.larger.notes = self.notes
        return self.larger.step

    def kinds(self, training: bool | None = None) -> Kinds:
        """The default output kinds."""
        return usual_kinds(self.compiled, training)

    def program(self, rank: int, kinds: Kinds) -> RankProgram:
        """The planned program of a rank."""
        size = self.compiled.after.mesh.size
        if not (isinstance(rank, int) and 0 <= rank < size):
            raise Error(f"no rank {rank} on this mesh", where="rank_module(...)", expected=f"0 .. {size - 1}", got=rank)
        return self.made(self.compiled.after, rank, kinds)

    def made(self, graph: Graph, rank: int, kinds: Kinds) -> RankProgram:
        """Lower ``graph`` for a rank, and run the rank passes."""
        context = RankContext(graph, self.device)
        with no_collection():
            made = program_of(context, rank, kinds, self.compiled.context.rules, self.rank_passes)
        self.notes.update(dict.fromkeys(context.notes))
        return made

    def running(self, rank: int, kinds: Kinds) -> RankProgram:
        """The program that runs on a rank: the planned one, or the user's replacement."""
        return self.step.changed.get((rank, kinds)) or self.program(rank, kinds)

    def verify(
        self, modules: Mapping[int, fx.GraphModule] | None, run: bool, known: Mapping[str, torch.Tensor]
    ) -> Verdict:
        """Verify the programs of all kinds of calls against the model."""
        compiled, shapes = self.compiled, {g.name: g.value.shape for g in self.compiled.before.inputs}
        with nullcontext() if run else no_collection():  # what runs makes tensors
            verdict = verify(
                compiled.before,
                compiled.after,
                compiled.context.rules,
                self._asked(modules or {}),
                run,
                {name: tensor for name, tensor in known.items() if shapes.get(name) == tuple(tensor.shape)},
                torch.device(self.device),
            )
        if compiled.hints.batch_stats is not None:
            whose = "rank" if compiled.hints.batch_stats == "local" else "microbatch"
            verdict = replace(verdict, claim=f"{verdict.claim} with batch norms of each {whose}'s part of the batch")
        verdict = with_rules(verdict, compiled.after, compiled.context)
        return together([verdict, self.larger.verify(None, run, known)]) if verdict and self.larger else verdict

    def _asked(self, modules: Mapping[int, fx.GraphModule]) -> list[ProgramRequest]:
        """The programs to verify; ``modules`` replace some of the default ones."""
        there = {output.kind for output in self.compiled.before.outputs}
        meant = self.kinds()
        found = []
        for name, kinds in NAMES.items():
            usual = kinds in USUAL and not self.pulls
            lacks = {OutputKind.LOSS, OutputKind.PARAMETER} & (kinds - there)
            if not (usual or self.step.has_run(kinds)) or lacks:
                continue
            used = {rank: program for (rank, its), program in self.step.changed.items() if its == kinds}
            replaced = modules if kinds == meant else {}
            found.append(ProgramRequest(name, kinds, partial(self.made, kinds=kinds), used, replaced))
        return found

    def use(self, modules: Mapping[int, fx.GraphModule], proven: bool, known: Mapping[str, torch.Tensor]) -> None:
        """Run ``modules`` from now on, in the place of their ranks' programs.

        Raises:
            Error: they do not compute what the model computes (unless ``proven`` is False).
        """
        kinds = self.kinds()
        changed = {rank: self.program(rank, kinds).changed(module) for rank, module in modules.items()}
        if proven:
            verdict = self.verify(modules, False, known)
            if not verdict:
                raise Error(
                    "these programs are not the model, or cannot be proven to be",
                    where="pm.use(modules=...)",
                    expected="programs that pm.verify(modules=...) proves",
                    got=verdict.why,
                    remedy="mend them; or pm.use(modules, proven=False) runs them as they are",
                )
        self.unproven = (self.unproven - set(modules)) | (set() if proven else set(modules))
        for rank, program in changed.items():
            self.step.put(rank, kinds, program)

    def say_unused(self, programs: Programs, kinds: Kinds) -> None:
        """Warn where a call does not run the user's programs."""
        if self.step.changed and (programs is not self or kinds != self.kinds()):
            warnings.warn(
                f"programs that pm.use(...) put in are for {RUNS[self.kinds()]} as it was captured; this call (of "
                f"{RUNS.get(kinds, 'another kind')}{'' if programs is self else ', in another form'}) runs as planned",
                ShardfxWarning,
                stacklevel=4,
            )

    def save(self, folder: Path, ranks: Iterable[int] | None, options: Mapping[str, torch.Tensor]) -> Path:
        """Write the programs of ``ranks`` (None: those of this process) as files; gives the folder. ``options`` are the
        rates of an optimizer."""
        step, after = self.step, self.compiled.after
        folder.mkdir(parents=True, exist_ok=True)
        hints = self.compiled.hints
        named = leaf_names(hints.args, hints.kwargs, hints.targets)
        examples = {n: t for n, t in named if isinstance(t, torch.Tensor) and not t.is_meta and type(t) is torch.Tensor}
        examples |= options
        for rank in step.ranks if ranks is None else ranks:
            program = self.running(rank, self.kinds())
            write_rank(folder, rank, program, after.mesh, step.rank_inputs(rank, program, examples))
        if 0 in step.ranks:
            write_shared(folder, after, self.running(0, self.kinds()))
        return folder

    def warnings(self) -> list[str]:
        """Warnings about the programs: notes of rank passes, and unproven ones."""
        unproven = [
            f"rank {rank} runs an unproven program (pm.use(..., proven=False))" for rank in sorted(self.unproven)
        ]
        return [*self.notes, *unproven]

    def reject_changed(self, device: torch.device) -> None:
        """Raise where the user's programs would have to run on another kind of device.

        Raises:
            Error: naming their ranks.
        """
        ranks = sorted({rank for rank, _ in self.step.changed})
        if ranks:
            raise Error(
                "programs that pm.use(...) put in are for the kind of device that they were made on",
                where="pm.to(device)",
                expected=self.device,
                got=f"{device.type}, with programs of rank {', '.join(map(str, ranks))} put in",
                remedy="move pm first, then change what pm.rank_module(rank) gives, and use that",
            )
