"""ParallelModule: the model, parallel, as an ordinary ``nn.Module``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from shardfx.compile import Compiled
from shardfx.ir.capture.frontend.model_preparation import STATE, quiet_copies
from shardfx.ir.errors import Error
from shardfx.module.call_signature import CallReader, reject_traces
from shardfx.module.execution_target import CompileOptions, ExecutionTarget
from shardfx.module.model_state import ModelState, stamp_state_dicts
from shardfx.module.module_tree import ProxyTree
from shardfx.module.optimizer_hooks import watch_parameters
from shardfx.module.optimizer_states import LOADED, SAVED, carry_over, joined, sharding
from shardfx.module.planned_module import PlannedModule
from shardfx.module.program_optimizer import ProgramOptimizer
from shardfx.module.programs import Programs
from shardfx.module.specializations import Specializations
from shardfx.module.state_checks import SourceModelWatch, SourceWeightsCheck
from shardfx.runtime.distributed.peers import Peers
from shardfx.runtime.store import version

WITH_RESULTS = "with_results"


class ParallelModule(PlannedModule):
    """What :func:`shardfx.parallelize` returns. Call it like the model, with the targets behind the arguments::

        loss = pm(x, y)
        loss.backward()
        optimizer.step()

    ``pm(x, y)`` takes the global batch, runs forward and backward, and gives the loss of the global batch. Under
    ``torch.no_grad()`` it runs the forward only; without targets it gives the model's own results. Under ``torchrun``
    a rank may also pass its own part of each input; it then gets its own part of the results.
    """

    _reader: CallReader
    _optimizer: ProgramOptimizer | None
    _source_check: SourceWeightsCheck | None

    def __init__(
        self,
        compiled: Compiled,
        place: ExecutionTarget,
        peers: Peers,
        model: nn.Module,
        variants: Specializations,
        optimizer: object = None,
    ) -> None:
        super().__init__()
        self._compiled, self._target, self.mesh = compiled, place, compiled.after.mesh
        self._state = ModelState(compiled, place.make_store(compiled.after), model, variants.source)
        self._peers = peers
        peers.holds(self._state.store)
        self._compiling = None
        self._variants, self._reader = variants, CallReader(compiled.hints)
        self._watch = self._measured = self._optimizer = self._source_check = None
        self._state.load_from(model)
        own = {name for name in vars(self) if name.startswith("_") and name not in STATE}
        self.__dict__["_own"] = frozenset((*own, "_tree"))
        self._tree = ProxyTree(self, model, variants.source)
        self._register()
        stamp_state_dicts(self)
        first = variants.first_signature(compiled, self._state.trainable)
        variants.begin(first, self._new_programs(compiled), self._state.filled)
        if optimizer is not None:
            carry_over(optimizer, model, self._state)

    def _watch_model(self, model: nn.Module, watch: SourceModelWatch) -> None:
        """Have each call check that the source model's weights are unchanged."""
        self._source_check = SourceWeightsCheck(model, self._state, watch)

    def _register(self) -> None:
        self._tree.register(self._state)
        update = self._compiled.captured.update
        stepped = {name for group in update.groups for name in group.names} if update is not None else ()
        watch_parameters(self._store, stepped, self._norm)

    def _new_programs(self, compiled: Compiled) -> Programs:
        return Programs(compiled, self._target, self._store, self._compiling)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        made = memo[id(self)] = type(self).__new__(type(self))
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        memo.update({id(grad): grad.clone() for grad in grads})  # torch itself copies no DTensor of a part of a bucket
        with quiet_copies():
            made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        made._peers.holds(made._state.store)
        made._register()
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        """``pm.to(device)``, ``pm.cuda()``: the plan is kept; programs are lowered again for the new kind of device.

        Raises:
            Error: another dtype, which is another plan; a device that this rank's process group does not serve; or
                programs that :meth:`use` put in, which are for the kind of device that they were made on.
        """
        dtypes = {t.dtype for t in (*self.parameters(), *self.buffers())}
        place = self._target.moved(fn, dtypes, self._programs.reject_changed)
        moves = place is not self._target
        if moves:
            if self._compiling is not None:
                self._compiling.check(self._compiled, place.device, place.virtual)
            self._target = place
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if moves:
            self._state.store.to(place.device)
            self._register()
            self._variants.renew(self._new_programs)
        return self

    # ---- calling --------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # what a model around pm, or a whole loop, is compiled to calls programs as they are
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, with gradients ready for ``backward()``; without the loss's targets, the model's global results.

        A call of another signature than the captured one (mode, shapes, numbers, required gradients) is planned when it
        is first seen, up to ``Hints(max_specializations=8)``. A loss of the results may be computed
        outside, which costs a second forward. ``pm(x, y, with_results=True)`` gives the loss, and results without a
        gradient.

        Raises:
            Error: inputs are not those of the capture; ranks make different calls; a rank fails.
        """
        return self._run_call(args, kwargs)

    def train(self, mode: bool = True) -> ParallelModule:
        """Set the training mode as ``model.train(mode)`` does, also where that leaves some modules as they are."""
        self._twin.train(mode)
        return self

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a full training step: forward, backward, and the update of ``Hints(optimizer=...)``; gives the loss::

            for x, y in batches:
                loss = pm.step(x, y)
                scheduler.step()        # torch.optim.lr_scheduler.CosineAnnealingLR(pm.optimizer, 1000)

        There are no gradients afterwards. With ``with_results=True``: the loss, and the results.

        Raises:
            Error: there is no optimizer in the plan; as for a call.
        """
        return self._run_call(args, kwargs, self.optimizer)

    def _run_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: ProgramOptimizer | None = None
    ) -> Any:
        """Run a call, with an ``optimizer`` a full training step."""
        with self._peers.calling():
            reject_traces("pm(...)")
            self._state.check_complete()
            self._tree.check()
            if self._source_check is not None:
                self._source_check.check()
            update = self._compiled.captured.update
            if optimizer is not None:
                optimizer.begin()
            elif update is not None and update.counts:  # a scale of the loss is read in every call
                self.optimizer.begin_counts()
            beside = WITH_RESULTS not in self._compiled.hints.kwargs and bool(kwargs.pop(WITH_RESULTS, False))
            call = self._reader.read(args, kwargs)
            around = self._peers, self._new_programs, self._watch
            return self._variants.run(call, *around, beside, optimizer.options() if optimizer is not None else None)

    @contextmanager
    def _together(self, what: str, words: Mapping[str, str] | None = None, anew: bool = False) -> Iterator[None]:
        """Agree with all ranks on an operation, in ``words`` by subject; ``anew``: it loads all that is stored.

        Raises:
            Error: on every rank, with both sides, where ranks say different words.
        """
        said = {"runs": what, **(words or {})}
        with self._peers.calling():
            self._peers.agree(tuple(said.items()), lambda: said, anew=anew)
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all parameters by their norm as one vector, which it gives: what
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does to the model on one device. Under
        ``torchrun`` all ranks call it.

        Raises:
            RuntimeError: ``error_if_nonfinite``, and the norm is not finite.
        """
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    def _norm(self, grads: Mapping[str, torch.Tensor], kind: float) -> torch.Tensor:
        """The global norm of gradients, from each rank's own."""
        with self._together("the norm of gradients"):
            return self._store.norm(grads, kind)

    @property
    def optimizer(self) -> ProgramOptimizer:
        """The optimizer in the program: groups, rates and states (see :class:`.ProgramOptimizer`).

        Raises:
            Error: the plan has none.
        """
        if self._optimizer is None:
            self._optimizer = ProgramOptimizer(self._state)
        return self._optimizer

    def _in_program(self, optimizer: object, where: str) -> ProgramOptimizer | None:
        """The optimizer in the program, if it is the one passed; None: it is one of torch's own.

        Raises:
            Error: it is in the program of another plan, or none at all.
        """
        own = isinstance(optimizer, ProgramOptimizer)
        if own and optimizer is self.optimizer:
            return self.optimizer
        if own or not hasattr(optimizer, "param_groups"):
            raise Error(
                "this is no optimizer of this module",
                where=where,
                expected="one of pm.parameters(), or pm.optimizer",
                got="the optimizer of another plan" if own else repr(optimizer)[:100],
                remedy="call it on the module whose optimizer it is; load what it gives into the other one's",
            )
        return None

    # ---- the programs ---------------------------------------------------------------------------------------

    def use(self, modules: Mapping[int, fx.GraphModule], *, proven: bool = True) -> None:
        """Prove modified programs, then run them, each in the place of that of its rank, in calls of the captured
        signature and of the kind that ``rank_module`` shows; others run as planned, with a warning. ::

            changed = pm.rank_module(1)
            ...
            pm.use(modules={1: changed})

        Args:
            modules: changed programs by rank, of what ``pm.rank_module(rank)`` gives.
            proven: False runs them unproven, and the report says so.

        Raises:
            Error: a program is not the model, or of another plan; an unknown rank.
        """
        self._programs.use(modules, proven, self._state.known_inputs())

    def compile(self, *, cuda_graphs: bool = False, **options: Any) -> None:
        """Run programs through ``torch.compile(**options)`` from now on. ::

            pm.compile()                    # or: pm.compile(cuda_graphs=True)
            for x, y in batches:
                loss = pm.step(x, y)

        torch plans memory itself: the programs are then those of the rank passes that leave memory to it, and
        ``rank_module``, ``verify`` and ``report`` speak of them. What :meth:`use` put in runs on as it is. Transfers of
        offload, and of a pipeline's stages on real ranks, are done between what is compiled.

        Args:
            cuda_graphs: record ``pm.step`` as one CUDA graph, for each call signature, launched from the fourth step
                on. Inputs are copied to static memory, and memory of a step is kept between steps.
            options: of ``torch.compile``.

        Raises:
            Error: an option that ``torch.compile`` does not have; ``Hints(arena=True)`` plans memory, too; with
                ``cuda_graphs``, no CUDA device, no optimizer in the plan, a pipeline, offload, guards, or several
                virtual ranks.
        """
        compiling = CompileOptions(options, cuda_graphs)
        compiling.check(self._compiled, self._target.device, self._target.virtual)
        self._compiling = compiling
        for _, programs in self._variants.known:
            programs.compile(compiling)

    def save_programs(self, folder: str | Path, ranks: Iterable[int] | None = None) -> Path:
        """Write the ranks' programs as Python files that run with torch alone: ``torchrun folder/run.py``, with weights
        and (real) example inputs. Under ``torchrun`` all ranks call it, and each writes its own."""
        options = {}
        if self._compiled.captured.update is not None:
            self.optimizer.begin()
            options = self.optimizer.options()
        return self._programs.save(Path(folder), ranks, options)

    # ---- state ----------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Full parameters and buffers by the model's own names, tied ones under each of their names."""
        with self._together("full_state_dict()"):
            return self._state.full()

    def load_full_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load full parameters and buffers by the model's own names, each rank its shards.

        What is loaded already is written over, so that optimizers stay valid. A plan that was made of a fake or meta
        model gets its weights here. Under ``torchrun`` all ranks call it, and rank 0's tensors are loaded: the others
        may give tensors on ``meta``.

        Raises:
            Error: missing or unexpected names (unless ``strict`` is False), a wrong shape or dtype.
        """
        with self._together("load_full_state_dict(...)", anew=True):
            self._state.load_full(state_dict, strict)
            self._register()

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer of ``pm.parameters()``, or of ``pm.optimizer``, with full states, as one of
        the model itself would have it. Under ``torchrun`` all ranks call it.

        Raises:
            Error: a state is not sharded as its parameter is (Adafactor's); it is the optimizer of another plan.
        """
        with self._together("full_optimizer_state_dict(...)"):
            if own := self._in_program(optimizer, SAVED):
                return own.full_state_dict()
            return joined(self._state, optimizer)

    def load_full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load full states into such an optimizer, each rank its shards: those of :meth:`full_optimizer_state_dict`
        under any plan, or of an optimizer of the model itself. Under ``torchrun`` rank 0's tensors are loaded.

        Raises:
            Error: the groups are others; a state cannot be sharded as its parameter is; it is another plan's optimizer.
        """
        with self._together("load_full_optimizer_state_dict(...)"):
            if own := self._in_program(optimizer, LOADED):
                own.load_full_state_dict(state_dict)
            else:
                optimizer.load_state_dict(sharding(self._state, optimizer, state_dict))

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model itself, with its current full weights, to save it or use it unsharded::

            with pm.gathered() as model:
                model.save_pretrained(folder)

        Under ``torchrun`` all ranks open it, and each has the full model. Weights that are changed within stay the
        model's.

        Raises:
            Error: weights were changed within, which ``pm`` would not know of.
        """
        with self._together("gathered()"):
            self._state.check_complete()
            model = self._state.filled(self._variants.source.module).to(self._target.device)
        before = [version(p) for p in model.parameters()]
        yield model
        if [version(p) for p in model.parameters()] != before:
            raise Error(
                "weights were changed within pm.gathered()",
                where="with pm.gathered() as model",
                expected="a model that is read",
                got="one that was written to; pm has the weights from before",
                remedy="pm.load_full_state_dict(model.state_dict())",
            )

    @staticmethod
    def no_sync() -> AbstractContextManager[None]:
        """A no-op for scripts that accumulate gradients with ``DistributedDataParallel``: the gradients of each call
        are those of its global batch, and sums of them are right."""
        return nullcontext()

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Full gradients by the model's own names; parameters without one are left out."""
        with self._together("full_grads()"):
            return self._state.full_grads()
