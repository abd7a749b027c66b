"""A parallel module that steps its own parameters: the optimizer is a part of the plan."""

from __future__ import annotations

from typing import Any

from shardfx.compiled import Compiled
from shardfx.runtime.peers import Peers

from .call import read_call
from .held.program_optimizer import ProgramOptimizer
from .held.tree import Tree
from .programs import Programs
from .watched_module import WatchedModule

WITH_RESULTS = "with_results"


class SteppedModule(WatchedModule):
    """What a parallel module has of ``Hints(optimizer=...)``."""

    _peers: Peers
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
            self._state.check_complete()
            self._tree.check()
            optimizer.begin()
            beside = WITH_RESULTS not in self._compiled.hints.kwargs and bool(kwargs.pop(WITH_RESULTS, False))
            call = read_call(self._compiled.hints, args, kwargs)
            around = self._tree.training, self._peers, self._new_programs, self._watch
            return self._variants.run(call, *around, beside, optimizer.options())

    def _begin_counts(self) -> None:
        """What the optimizer's step keeps beside states of parameters is there from the first call on."""
        update = self._compiled.captured.update
        if update is not None and update.counts:
            self.optimizer.begin_counts()

    @property
    def optimizer(self) -> ProgramOptimizer:
        """The optimizer in the program: groups, rates and states (see :class:`.held.program_optimizer`).

        Raises:
            Error: the plan has none.
        """
        if self._optimizer is None:
            self._optimizer = ProgramOptimizer(self._state)
        return self._optimizer
