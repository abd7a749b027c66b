"""A parallel module that steps its own parameters: the optimizer is a part of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardfx.compiled import Compiled
from shardfx.ir.errors import Error
from shardfx.runtime.peers import Peers

from .call import Reader
from .forms.surroundings_of_call import check_modes
from .held.clipping import checked, clip, gradients_here
from .held.program_optimizer import ProgramOptimizer
from .held.tree import Tree
from .programs import Programs
from .watched_module import WatchedModule

Tensor = torch.Tensor
WITH_RESULTS = "with_results"


class SteppedModule(WatchedModule):
    """What a parallel module has of ``Hints(optimizer=...)``."""

    _peers: Peers
    _reader: Reader
    _tree: Tree
    _optimizer: ProgramOptimizer | None

    def _new_programs(self, compiled: Compiled) -> Programs:
        raise NotImplementedError

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a whole step: forward, backward, and the update of ``Hints(optimizer=...)``; gives the loss::

            for x, y in batches:
                loss = pm.step(x, y)
                scheduler.step()        # torch.optim.lr_scheduler.CosineAnnealingLR(pm.optimizer, 1000)

        Parameters, buffers and the optimizer's states are those of after the step; there are no gradients. Inputs are
        as for a call, also in other batch sizes and modes. With ``with_results=True``: the loss, and the results.

        Raises:
            Error: there is no optimizer in the plan; as for a call.
        """
        optimizer = self.optimizer
        with self._peers.calling():
            check_modes("pm(...)")
            self._state.check_complete()
            self._tree.check()
            optimizer.begin()
            beside = WITH_RESULTS not in self._compiled.hints.kwargs and bool(kwargs.pop(WITH_RESULTS, False))
            call = self._reader.read(args, kwargs)
            around = self._tree.training, self._peers, self._new_programs, self._watch
            return self._variants.run(call, *around, beside, optimizer.options())

    def _begin_counts(self) -> None:
        """What the optimizer's step keeps beside states of parameters is there from the first call on."""
        update = self._compiled.captured.update
        if update is not None and update.counts:
            self.optimizer.begin_counts()

    @contextmanager
    def _together(self, what: str, anew: bool = False) -> Iterator[None]:
        """What all ranks are asked for; ``anew``: it loads all that is stored."""
        with self._peers.calling():
            self._peers.agree(what, lambda: {"runs": what}, anew=anew)
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of all parameters by their norm as one vector, which it gives: what
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does to the model on one device. Under
        ``torchrun`` all ranks call it.

        Raises:
            RuntimeError: ``error_if_nonfinite``, and the norm is not finite.
        """
        grads = gradients_here(self._store)
        total = checked(self._norm(grads, norm_type), error_if_nonfinite)
        clip(total, grads, max_norm)
        return total

    def _norm(self, grads: Mapping[str, Sequence[Tensor]], kind: float) -> Tensor:
        """The norm of gradients, of which each rank gives its own."""
        with self._together("the norm of gradients"):
            return self._store.norm(grads, kind)

    @property
    def optimizer(self) -> ProgramOptimizer:
        """The optimizer in the program: groups, rates and states (see :class:`.held.program_optimizer`).

        Raises:
            Error: the plan has none.
        """
        if self._optimizer is None:
            self._optimizer = ProgramOptimizer(self._state)
        return self._optimizer

    def _in_program(self, optimizer: object, where: str) -> ProgramOptimizer | None:
        """The optimizer in the program, if that is the one that is given; None: it is one of torch's own.

        Raises:
            Error: it is in the program of another plan, or none at all.
        """
        if isinstance(optimizer, ProgramOptimizer) and optimizer is self.optimizer:
            return optimizer
        if isinstance(optimizer, ProgramOptimizer) or not hasattr(optimizer, "param_groups"):
            raise Error(
                "this is no optimizer of this module",
                where=where,
                expected="one of pm.parameters(), or pm.optimizer",
                got="the optimizer of another plan"
                if isinstance(optimizer, ProgramOptimizer)
                else repr(optimizer)[:100],
                remedy="call it on the module whose optimizer it is; load what it gives into the other one's",
            )
        return None
