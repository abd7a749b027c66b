"""ParallelModule: the model, parallel, as an ordinary ``nn.Module``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.compile import after_each_pass
from shardfx.compiled import Compiled
from shardfx.explain.explanation import Explanation, explain
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.lower import generate
from shardfx.ir.program.rank_program import Program
from shardfx.ir.spec import TensorType
from shardfx.plan import Plan, make_plan
from shardfx.report.figures import BYTES_PER_SECOND, FLOPS_PER_SECOND, Report
from shardfx.report.make_report import make_report
from shardfx.runtime.debug.nan_hunt import NanHunt
from shardfx.runtime.verify.verdict import Verdict, verify
from shardfx.runtime.virtual.virtual_engine import Kinds, Results

from .hand_out import HandOut
from .modes import OtherMode
from .state import check_names, check_types

TRAIN: Kinds = frozenset({OutputKind.LOSS, OutputKind.GRADIENT, OutputKind.BUFFER})
LOSS: Kinds = frozenset({OutputKind.LOSS, OutputKind.BUFFER})
STORED = (InputKind.PARAMETER, InputKind.BUFFER)
INFER: Kinds = frozenset({OutputKind.RESULT, OutputKind.BUFFER})


class ParallelModule(nn.Module):
    """What :func:`shardfx.parallelize` returns. Call it like the model, with the targets behind the arguments::

        loss = pm(x, y)
        loss.backward()
        optimizer.step()

    ``pm(x, y)`` takes the global batch, runs forward and backward, and gives the loss of the whole batch. Under
    ``torch.no_grad()`` it runs the forward only; without targets it gives the model's own results. Under ``torchrun``
    a rank may also pass its own part of each input; it then gets its own part of the results.
    """

    def __init__(self, compiled: Compiled, mesh: Mesh, engine: Any, model: nn.Module) -> None:
        super().__init__()
        self._compiled = compiled
        self.mesh = mesh
        self._engine = engine
        self.training = model.training
        self._outputs = {(o.kind, o.name): o for o in compiled.after.outputs}
        self.captured_training = model.training
        self._other: OtherMode | None = None
        self._twin: list[ParallelModule] = []  # in a list: not a submodule, its parameters are ours
        self._complete = False
        self._hunt: NanHunt | None = None
        names = [g.name for g in compiled.after.inputs]
        self._extra = {
            name: tensor.detach().clone()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if compiled.captured.aliases.get(name, name) not in names and not tensor.is_meta
        }
        self._state_names = list(model.state_dict())
        aliases = compiled.captured.aliases
        self._trainable = {aliases.get(n, n): p.requires_grad for n, p in model.named_parameters()}
        self._register()

    def _register(self) -> None:
        """Make the shards parameters and buffers of this module, under the model's own names."""
        for name, pieces in self._engine.parameters.items():
            path, _, leaf = name.rpartition(".")
            holder = _holder(self, path)
            if len(pieces) == 1:
                holder._parameters[leaf] = pieces[0]
            else:
                holder._modules[leaf] = nn.ParameterList(pieces)
        for name, tensors in self._engine.buffers.items():
            path, _, leaf = name.rpartition(".")
            holder = _holder(self, path)
            for i, tensor in enumerate(tensors):
                own = leaf if len(tensors) == 1 else f"{leaf}_{i}"
                holder._buffers[own] = tensor
                if name not in self._state_names:
                    holder._non_persistent_buffers_set.add(own)

    # ---- calling --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training != self.captured_training:
            other = self._in_other_mode()
            other._hunt = self._hunt
            return other(*args, **kwargs)
        inputs, has_targets = self._inputs(args, kwargs)
        graph = self.after
        has_loss = (OutputKind.LOSS, "loss") in self._outputs
        if has_targets and has_loss:
            if torch.is_grad_enabled():
                return self._train(self._run(TRAIN, inputs))
            results = self._run(LOSS, inputs)
            return results[OutputKind.LOSS, "loss"][0]
        results = self._run(INFER, inputs)
        outputs = [o for o in graph.outputs if o.kind is OutputKind.RESULT]
        if any(self._engine.is_local(g, inputs[g.name].shape) for g in graph.inputs if g.name in inputs):
            given = iter([results[o.kind, o.name][0] for o in outputs])
        else:
            given = iter([self._engine.join(o, results[o.kind, o.name]) for o in outputs])
        leaves = [next(given) if leaf == "tensor" else leaf for leaf in self._compiled.captured.result_leaves]
        return pytree.tree_unflatten(leaves, self._compiled.captured.result_tree)

    def set_other_mode(self, other: OtherMode) -> None:
        """Say how the plan for the other mode is made."""
        self._other = other

    def _in_other_mode(self) -> ParallelModule:
        """The same module, planned for the mode that it was not captured in."""
        if not self._twin:
            if self._other is None:
                raise Error(
                    f"this plan is for {_mode(self.captured_training)} mode only",
                    where="pm(...)",
                    expected=f"pm.{_mode(self.captured_training)}()",
                    got=_mode(self.training),
                )
            self._twin.append(self._other.make(self))
        return self._twin[0]

    def share(self, other: ParallelModule) -> None:
        """Work on the shards of ``other`` from now on."""
        self._engine.parameters, self._engine.buffers = other._engine.parameters, other._engine.buffers
        self._register()

    def _run(self, kinds: Kinds, inputs: Mapping[str, torch.Tensor]) -> Results:
        if not self._complete:
            lacking = self._lacking()
            self._complete = not lacking
        if not self._complete:
            raise Error(
                "this plan lacks weights: the model was fake, or on meta",
                where="pm(...)",
                expected="real weights",
                got=f"none for {lacking[0]} and {len(lacking) - 1} more",
                remedy="pm.load_full_state_dict(state_dict), or parallelize a model with weights",
            )
        results: Results = self._engine.run(kinds, inputs, self._hunt)
        self._engine.store_buffers(results)
        return results

    def _train(self, results: Results) -> torch.Tensor:
        parameters, grads = [], []
        for name, pieces in self._engine.parameters.items():
            given = results.get((OutputKind.GRADIENT, name))
            for i, parameter in enumerate(pieces):
                if parameter.requires_grad:
                    parameters.append(parameter)
                    grads.append(given[i] if given is not None else None)
        loss = results[OutputKind.LOSS, "loss"][0]
        return HandOut.apply(loss, grads, *parameters)  # type: ignore[no-any-return, no-untyped-call]

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], bool]:
        """The tensors by name, checked; and whether targets were given."""
        expected = {g.name: g for g in self.after.inputs if g.kind in (InputKind.ARGUMENT, InputKind.TARGET)}
        leaves = self._compiled.captured.leaves
        count = len(self._compiled.hints.args)
        named = dict(leaf_names(args[:count], kwargs, args[count:]))
        tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor)}
        has_targets = len(args) > count or not any(name.startswith("targets.") for name in leaves)
        wanted = [n for n in leaves if has_targets or not n.startswith("targets.")]
        if sorted(tensors) != sorted(wanted):
            raise Error(
                "the inputs are not those that the model was captured with",
                where="pm(...)",
                expected=", ".join(wanted),
                got=", ".join(tensors) or "no tensors",
                remedy="pass the model's arguments first, then the targets",
            )
        for name, tensor in tensors.items():
            given = expected.get(name)
            if given is None:
                continue
            if not self._engine.accepts(given, tensor.shape) or tensor.dtype != given.value.type.dtype:
                raise Error(
                    f"input {name!r} has the wrong shape or dtype",
                    where="pm(...)",
                    expected=f"{self._engine.shapes(given)}, {given.value.type.dtype}",
                    got=f"{tuple(tensor.shape)}, {tensor.dtype}",
                    remedy="pass the global batch, or capture with another example (Hints(args=...))",
                )
        return tensors, has_targets

    # ---- what there is to see -------------------------------------------------------------------------------

    @property
    def before(self) -> Graph:
        """The program as it was captured."""
        return self._compiled.before

    @property
    def after(self) -> Graph:
        """The program after all passes."""
        return self._compiled.after

    def rank_module(self, rank: int, *, training: bool | None = None) -> fx.GraphModule:
        """The program of any rank, also of one that this process is not.

        Inputs are the rank's own pieces, in the order of the placeholders; results are the loss, gradients and new
        buffers (or, where there is no loss, the model's results).
        """
        return self._program(rank, training).module

    def _program(self, rank: int, training: bool | None) -> Program:
        return generate(self.after, rank, self._compiled.context.rules, self._kinds(training))

    def _kinds(self, training: bool | None) -> Kinds:
        train = training if training is not None else (OutputKind.LOSS, "loss") in self._outputs
        return TRAIN if train else INFER

    def save_programs(self, folder: str | Path, ranks: Iterable[int] | None = None) -> Path:
        """Write the ranks' programs as Python files that run with torch alone: ``torchrun folder/run.py``.

        Weights and (real) example inputs lie beside them. Under ``torchrun`` all ranks call it, and each writes its
        own; the weights of other ranks are not known there.
        """
        from shardfx.runtime.export.program_files import write_rank, write_shared

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        hints = self._compiled.hints
        named = leaf_names(hints.args, hints.kwargs, hints.targets)
        examples = {n: t for n, t in named if isinstance(t, torch.Tensor) and not t.is_meta and type(t) is torch.Tensor}
        for rank in self._engine.ranks if ranks is None else ranks:
            program = self._program(rank, None)
            write_rank(folder, rank, program, self.mesh, self._engine.rank_inputs(rank, program, examples))
        if 0 in self._engine.ranks:
            write_shared(folder, self.after, self._program(0, None))
        return folder

    # ---- state ----------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by the model's own names, tied ones under each of their names."""
        aliases = self._compiled.captured.aliases
        result: dict[str, torch.Tensor] = {}
        for name in self._state_names:
            known = aliases.get(name, name)
            if known in self._engine.parameters:
                result[name] = self._engine.whole(known, [p.detach() for p in self._engine.parameters[known]])
            elif known in self._engine.buffers:
                result[name] = self._engine.whole(known, self._engine.buffers[known])
            else:
                result[name] = self._extra[name]
        return result

    def load_full_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load whole parameters and buffers by the model's own names, each rank its pieces.

        What is loaded already is written over, so that optimizers stay valid. A plan that was made of a fake or meta
        model gets its weights here. Under ``torchrun`` all ranks call it, and rank 0's tensors are loaded.

        Raises:
            Error: missing or unexpected names (unless ``strict`` is False), a wrong shape or dtype.
        """
        aliases = self._compiled.captured.aliases
        stored = {g.name: g.value.type for g in self.after.inputs if g.kind in STORED}
        names: dict[str, list[str]] = {name: [name] for name in stored}
        for name, known in aliases.items():
            if known in stored and name != known:
                names[known].append(name)
        if strict:
            wanted = {aliases.get(name, name) for name in self._state_names} | set(self._lacking())
            needed = {name: given for name, given in names.items() if name in wanted}
            needed |= {name: [name] for name in self._extra if name in self._state_names}
            check_names(state_dict, self._state_names, needed, [*aliases, *self._extra])
        extra = {name: TensorType(tuple(tensor.shape), tensor.dtype) for name, tensor in self._extra.items()}
        check_types(state_dict, extra | {n: stored[k] for n, k in aliases.items() if k in stored} | stored)
        whole = {
            k: next(state_dict[n] for n in given if n in state_dict)
            for k, given in names.items()
            if any(n in state_dict for n in given)
        }
        self._engine.load(whole, self._trainable)
        self._extra |= {name: state_dict[name].detach().clone() for name in self._extra if name in state_dict}
        self._register()

    def _lacking(self) -> list[str]:
        """The parameters and buffers that the plan has no content for: the model was fake, or on meta."""
        held = (self._engine.parameters, self._engine.buffers)
        return [g.name for g in self.after.inputs if g.kind in STORED and not any(g.name in h for h in held)]

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Whole gradients by the model's own names; parameters without one are left out."""
        result = {}
        for name, pieces in self._engine.parameters.items():
            grads = [p.grad for p in pieces]
            if all(g is not None for g in grads):
                result[name] = self._engine.whole(name, grads)
        return result

    # ---- understanding it -----------------------------------------------------------------------------------

    def verify(self, modules: Mapping[int, fx.GraphModule] | None = None, *, run: bool = False) -> Verdict:
        """Whether the ranks' programs compute what the model computes: true, or false with ``.why``.

        By default a proof, without numbers (what it proves and takes as given: see
        :mod:`shardfx.runtime.verify.proof.every_rank`). With ``run`` all ranks run beside the captured model in this
        process, in float64, on random numbers; a large model on shapes that are shrunk, as the verdict then says.

        Args:
            modules: programs that somebody changed, by rank; those of the other ranks are the plan's own.

        Raises:
            Error: an unknown rank; with ``run``, a model that is too large to run here and cannot be shrunk (programs
                that somebody changed cannot).

        Example::

            assert pm.verify()
            print(pm.verify(modules={1: changed}).why)
        """
        rules = self._compiled.context.rules
        return verify(self.before, self.after, rules, self._kinds(None), modules, run, self.known_inputs())

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
        hints = self._compiled.hints
        named = leaf_names(hints.args, hints.kwargs, hints.targets)
        known = {
            n: t for n, t in named if isinstance(t, torch.Tensor) and not t.is_meta and not isinstance(t, FakeTensor)
        }
        for given in self.after.of_kind(InputKind.BUFFER):
            pieces = self._engine.buffers.get(given.name, ())
            if len(pieces) == 1 and tuple(pieces[0].shape) == given.value.shape:
                known[given.name] = pieces[0]
        return known

    @property
    def plan(self) -> Plan:
        """The decisions: saved as JSON, compared, and given back as ``Hints(specs=plan.specs)``."""
        return make_plan(self._compiled)

    def report(
        self, *, flops_per_second: float = FLOPS_PER_SECOND, bytes_per_second: float = BYTES_PER_SECOND
    ) -> Report:
        """What the plan costs: ``.memory``, ``.communication``, ``.time`` (estimated at these rates), ``.warnings``."""
        return make_report(self._compiled, flops_per_second, bytes_per_second)

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


def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _holder(root: nn.Module, path: str) -> nn.Module:
    """The submodule of a dotted path, made where it is missing."""
    for part in path.split(".") if path else ():
        child = root._modules.get(part)
        if child is None:
            child = root._modules[part] = nn.Module()
        root = child
    return root
