"""ParallelModule: the model, parallel, as an ordinary ``nn.Module``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from shardfx.compile import no_collection
from shardfx.compiled import Compiled
from shardfx.explain.explanation import Explanation, explain
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.program.rank_module import RankModule
from shardfx.ir.program.rank_program import RankProgram
from shardfx.plan import Plan, make_plan
from shardfx.report.figures import Report
from shardfx.report.make_report import make_report
from shardfx.rerun import after_each_pass, diff, verify_every_pass
from shardfx.runtime.debug.nan_hunt import NanHunt
from shardfx.runtime.step import Results
from shardfx.runtime.verify.verdict import Verdict

from .calling import model_results, named_inputs
from .hand_out import hand_out
from .modes import OtherMode
from .place import Place
from .programs import INFER, LOSS, TRAIN, Programs
from .state import ModelState, register


class ParallelModule(nn.Module):
    """What :func:`shardfx.parallelize` returns. Call it like the model, with the targets behind the arguments::

        loss = pm(x, y)
        loss.backward()
        optimizer.step()

    ``pm(x, y)`` takes the global batch, runs forward and backward, and gives the loss of the whole batch. Under
    ``torch.no_grad()`` it runs the forward only; without targets it gives the model's own results. Under ``torchrun``
    a rank may also pass its own part of each input; it then gets its own part of the results.
    """

    def __init__(self, compiled: Compiled, place: Place, model: nn.Module, other: OtherMode) -> None:
        super().__init__()
        self._compiled, self._place, self.mesh = compiled, place, compiled.after.mesh
        self.training = model.training
        self.captured_training = model.training
        self._state = ModelState(compiled, place.make_store(compiled.after), model)
        self._programs = self._new_programs(compiled)
        self._other, self._twin = other, list[Programs]()
        self._hunt: NanHunt | None = None
        self._state.load_from(model)
        register(self, self._state)

    def _new_programs(self, compiled: Compiled) -> Programs:
        place, store = self._place, self._state.store
        passes = place.rank_passes(compiled.hints)
        return Programs(compiled, place.device.type, passes, store, lambda: place.make_engine(compiled.after))

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        """``pm.to(device)``, ``pm.cuda()``: the plan stays, its programs are made anew for the other kind of device.

        Raises:
            Error: another dtype, which is another plan; or a device that this rank's process group does not serve.
        """
        made = fn(torch.empty(0, device=self._place.device))
        if made.dtype is not torch.empty(0).dtype:
            raise Error(
                "a plan is for the dtypes that it was captured in",
                where="pm.to(dtype)",
                expected="another device, or none",
                got=made.dtype,
                remedy="convert the model, then parallelize it",
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if made.device.type != self._place.device.type:
            self._place = self._place.moved(made.device)
            self._state.store.to(made.device)
            register(self, self._state)
            self._programs = self._new_programs(self._compiled)
            self._twin = [self._new_programs(each.compiled) for each in self._twin]
        return self

    # ---- calling --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step on this process's ranks. With the loss's targets it gives the loss (and, where gradients are
        enabled, has them ready for ``backward()``), without them the model's results, whole.

        Raises:
            Error: inputs are not those of the capture, or a rank fails.
        """
        programs = self._programs if self.training == self.captured_training else self._in_other_mode()
        compiled, step = programs.compiled, programs.step
        self._state.check_complete()
        inputs, has_targets = named_inputs(compiled, step, args, kwargs)
        if has_targets and programs.trains:
            if torch.is_grad_enabled():
                return self._train(step.run(TRAIN, inputs, self._hunt))
            return step.run(LOSS, inputs, self._hunt)[OutputKind.LOSS, "loss"][0]
        return model_results(compiled, step, inputs, step.run(INFER, inputs, self._hunt))

    def _in_other_mode(self) -> Programs:
        """The programs of the mode that the model was not captured in, on the same store."""
        if not self._twin:
            compiled = self._other.make(self.after, not self.captured_training)
            self._twin.append(self._new_programs(compiled))
        return self._twin[0]

    def _train(self, results: Results) -> torch.Tensor:
        parameters, grads = [], []
        for name, pieces in self._state.store.parameters.items():
            given = results.get((OutputKind.GRADIENT, name))
            for i, parameter in enumerate(pieces):
                if parameter.requires_grad:
                    parameters.append(parameter)
                    grads.append(given[i] if given is not None else None)
        return hand_out(results[OutputKind.LOSS, "loss"][0], grads, parameters)

    # ---- the programs ---------------------------------------------------------------------------------------

    @property
    def before(self) -> Graph:
        """The program as it was captured."""
        return self._compiled.before

    @property
    def after(self) -> Graph:
        """The program after all passes."""
        return self._compiled.after

    def rank_module(self, rank: int, *, training: bool | None = None) -> RankModule:
        """The program that a rank runs, also of one that this process is not, as a ``GraphModule``.

        Inputs are the rank's own pieces, in the order of the placeholders; results are the loss, gradients and new
        buffers (or, where there is no loss, the model's results). ``str(pm.rank_program(rank))`` is its text.
        """
        with no_collection():
            return self._programs.module(rank, self._programs.kinds(training))

    def rank_program(self, rank: int, *, training: bool | None = None) -> RankProgram:
        """The program that a rank runs: its ``graph``, its text (``str``), what goes in and comes out."""
        with no_collection():
            return self._programs.running(rank, self._programs.kinds(training))

    def use(self, modules: Mapping[int, fx.GraphModule], *, proven: bool = True) -> None:
        """Prove programs that somebody changed, then run them, each in the place of that of its rank::

            changed = pm.rank_module(1)
            ...
            pm.use(modules={1: changed})

        Args:
            modules: changed programs by rank, of what ``pm.rank_module(rank)`` gives.
            proven: False runs them unproven, and the report says so.

        Raises:
            Error: a program is not the model, or of another plan; an unknown rank.
        """
        self._programs.use(modules, proven, self.known_inputs())

    def compile(self, **options: Any) -> None:
        """Run steps through ``torch.compile(**options)`` from now on.

        torch plans memory itself: the programs are then those of the rank passes ``waits`` and ``own-outputs`` alone,
        and ``rank_module``, ``verify`` and ``report`` speak of them.
        """
        user = self._place.own_rank_passes(self._compiled.hints)
        for programs in (self._programs, *self._twin):
            graph = programs.compiled.after
            programs.compile_with(lambda graph=graph: self._place.make_compiled(graph, options), user)  # type: ignore[misc]

    def save_programs(self, folder: str | Path, ranks: Iterable[int] | None = None) -> Path:
        """Write the ranks' programs as Python files that run with torch alone: ``torchrun folder/run.py``.

        Weights and (real) example inputs lie beside them. Under ``torchrun`` all ranks call it, and each writes its
        own; the weights of other ranks are not known there.
        """
        return self._programs.save(Path(folder), ranks)

    # ---- state ----------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by the model's own names, tied ones under each of their names."""
        return self._state.full()

    def load_full_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load whole parameters and buffers by the model's own names, each rank its pieces.

        What is loaded already is written over, so that optimizers stay valid. A plan that was made of a fake or meta
        model gets its weights here. Under ``torchrun`` all ranks call it, and rank 0's tensors are loaded.

        Raises:
            Error: missing or unexpected names (unless ``strict`` is False), a wrong shape or dtype.
        """
        self._state.load_full(state_dict, strict)
        register(self, self._state)

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Whole gradients by the model's own names; parameters without one are left out."""
        return self._state.full_grads()

    # ---- understanding it -----------------------------------------------------------------------------------

    def verify(
        self, modules: Mapping[int, fx.GraphModule] | None = None, *, run: bool = False, every_pass: bool = False
    ) -> Verdict:
        """Whether the ranks' programs compute what the model computes: true, or false with ``.why``.

        By default a proof, without numbers (what it proves and takes as given: see
        :mod:`shardfx.runtime.verify.proof.every_rank`). With ``run`` all ranks run beside the captured model in this
        process, in float64, on random numbers; a large model on shapes that are shrunk, as the verdict then says.

        Args:
            modules: programs that somebody changed, by rank; those of the other ranks are the plan's own.
            every_pass: compare the graph with the captured one after each pass first: the first pass after which it is
                another function is named.

        Raises:
            Error: an unknown rank; with ``run``, a model that is too large to run here and cannot be shrunk (programs
                that somebody changed cannot).

        Example::

            assert pm.verify()
            print(pm.verify(modules={1: changed}).why)
        """
        if every_pass and not (verdict := verify_every_pass(self._compiled)):
            return verdict
        return self._programs.verify(modules, run, self.known_inputs())

    @contextmanager
    def debug_nan(self, *, inf: bool = True) -> Iterator[None]:
        """Stop at the first node that makes a NaN or an inf from finite numbers, in forward or backward, on any rank::

            with pm.debug_nan():
                loss = pm(x, y)

        The error names the rank, the node, module path and source line, and what went into it (shapes, smallest and
        largest number). "First" is by the order of the program, over all ranks. Parameters, buffers and inputs that
        hold NaN already are named as such; infinities that the model writes down itself, as in a mask, are let
        through. Every result is looked at, so a step takes some times longer; outside of the context it costs nothing.

        Under ``torchrun`` all ranks open it; the rank that finds something raises that, and the others end with it.

        Args:
            inf: whether an infinity counts, too.

        Raises:
            Error: when something is found.
        """
        before, self._hunt = self._hunt, NanHunt(inf)
        try:
            yield
        finally:
            self._hunt = before

    def known_inputs(self) -> dict[str, torch.Tensor]:
        """Whole inputs whose content is known: real example inputs, and buffers that are not cut."""
        return self._state.known_inputs()

    @property
    def plan(self) -> Plan:
        """The decisions: saved as JSON, compared, and given back as ``Hints(specs=plan.specs)``."""
        return make_plan(self._compiled)

    def report(self, machine: Machine | str | None = None) -> Report:
        """What the plan costs: ``.memory``, ``.communication``, ``.time``, ``.warnings``.

        Memory and time are those of the program that rank 0 runs; seconds those of the machine that the hints name, or
        of another one (``"h100-dgx"``).
        """
        program = self._programs.running(0, self._programs.kinds())
        return make_report(self._compiled, program, machine, self._programs.warnings())

    def explain(self, name: str) -> Explanation:
        """Why a parameter, ``args.N``, a module's ops or a value (``%12``) are cut as they are, back to the hints.

        Raises:
            Error: nothing has this name.
        """
        return explain(self._compiled, name)

    def draw(self, folder: str | Path, every_pass: bool = False) -> list[Path]:
        """Draw the program as ``before.svg`` and ``after.svg``, if wished also after each pass; gives the paths."""
        from shardfx.visualize import draw_folder

        between = after_each_pass(self._compiled) if every_pass else {}
        return draw_folder({"before": self.before, **between, "after": self.after}, folder)

    def diff(self, name: str) -> str:
        """What a pass changed, as a unified diff of the graph's text (see :func:`shardfx.rerun.diff`)::

            print(pm.diff("fuse-comm"))

        Raises:
            Error: no pass of the plan has this name.
        """
        return diff(self._compiled, name)
