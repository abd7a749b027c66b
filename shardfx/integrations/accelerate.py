"""Scripts for ``accelerate``: ``prepare`` gives a parallel module, and no ``DistributedDataParallel``.

To accelerate the whole mesh is one device. So every rank passes the global batch (a loader's ``batch_size`` is the
mesh's), schedulers step once a step, metrics need no gathering, and what is saved is unsharded: a checkpoint is loaded
under any other plan, or by ``accelerate`` alone on one device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.utils._pytree as pytree
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from shardfx.api import parallelize
from shardfx.hints import Hints
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.module.optimizer_states import carry_over
from shardfx.module.parallel_module import ParallelModule

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class FullStateOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer of a parallel module; its state dict is the full one. Under ``torchrun`` all ranks ask for it."""

    pm: ParallelModule

    def state_dict(self) -> dict[str, Any]:
        """Full states, as an optimizer of the model itself has them."""
        return self.pm.full_optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load full states, each rank its shards."""
        self.pm.load_full_optimizer_state_dict(self.optimizer, state_dict)


class ParallelAccelerator(Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` that makes the model parallel in the place of wrapping it::

        accelerator = ParallelAccelerator(mesh=sx.Mesh(dp=2), hints=hints)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            accelerator.backward(model(x, y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(), optimizer.zero_grad()
        accelerator.save_state(folder)

    Args:
        mesh, hints: as for :func:`shardfx.parallelize`, for the one model that is prepared; None where parallel modules
            are passed to ``prepare``, of which there may be several.
        options: those of ``Accelerator``.

    Raises:
        Error: accelerate is configured for FSDP, DeepSpeed or the like, which would shard the model as well, or for
            ``torch.compile``.
    """

    def __init__(self, *, mesh: Mesh | None = None, hints: Hints | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._mesh, self._hints = mesh, hints
        self._begin()

    @classmethod
    def taking_over(cls, accelerator: Accelerator) -> ParallelAccelerator:
        """Convert an existing accelerator to this class, for parallel modules."""
        accelerator.__class__ = cls
        accelerator._mesh = accelerator._hints = None
        accelerator._begin()
        return accelerator  # type: ignore[no-any-return]

    def _begin(self) -> None:
        if self.state.distributed_type not in PLAIN:
            raise Error(
                "accelerate is configured to shard or wrap the model itself",
                where="ParallelAccelerator(...)",
                expected="a configuration for one process, or for several CPUs or GPUs",
                got=str(self.state.distributed_type),
                remedy="leave FSDP, DeepSpeed and the like out of it; say how the model is sharded by Hints(...)",
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise Error(
                "torch.compile is asked for of accelerate, which would compile around the ranks' programs",
                where="ParallelAccelerator(...)",
                expected="no dynamo backend",
                got=str(self.state.dynamo_plugin.backend),
                remedy="pm.compile(**options) on the parallel module that prepare gives (a Trainer's model_wrapped)",
            )
        self._parallel: list[tuple[ParallelModule, nn.Module | None]] = []
        self.register_load_state_pre_hook(self._load_models)

    # ---- the mesh is one device -------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """The distributed type of one device."""
        return DistributedType.NO

    @property
    def num_processes(self) -> int:
        """One: every process reads the global batch. ``state.num_processes`` is how many there are."""
        return 1

    @property
    def dispatch_batches(self) -> bool:
        """No: every process reads for itself."""
        return False

    def gather(self, tensor: Any, *options: Any, **more: Any) -> Any:
        """As it is: results are replicated, and the same on all ranks."""
        return tensor

    reduce = pad_across_processes = gather

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As it is, but for values that are repeated for the rows of a last, smaller batch: those rows alone."""
        tensors = all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(input_data))
        return super().gather_for_metrics(input_data) if tensors else input_data

    # ---- preparing --------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As ``Accelerator.prepare``: a model becomes a parallel module, and optimizers of it go on with that."""
        made = [self._as_parallel(each) if isinstance(each, nn.Module) else each for each in args]
        return super().prepare(*made, device_placement=device_placement)

    def _as_parallel(self, model: nn.Module) -> ParallelModule:
        known = next((pm for pm, _ in self._parallel if pm is model), None)
        if known is not None:
            return known
        original: nn.Module | None = None
        if isinstance(model, ParallelModule):
            pm = model
        elif self._mesh is None or self._hints is None or self._parallel:
            raise Error(
                "there is no plan for this model",
                where="accelerator.prepare(model)",
                expected="ParallelAccelerator(mesh=..., hints=...) for one model, or parallel modules",
                got=type(model).__name__,
                remedy="pass shardfx.parallelize(model, mesh, hints) to prepare",
            )
        else:
            original = model.to(self.device) if self.device_placement else model
            with self.autocast():
                pm = parallelize(original, self._mesh, self._hints)
        self.hold(pm, original)
        return pm

    def hold(self, pm: ParallelModule, model: nn.Module | None = None) -> None:
        """Know a parallel module, and the model that it was made of, so that optimizers of either are prepared."""
        self._parallel.append((pm, model))

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As ``Accelerator.prepare_optimizer``: one of the model's parameters goes on with those of the parallel
        module."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        for pm, model in self._parallel:
            if model is not None:
                carry_over(optimizer, model, pm._state)
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owner = next((pm for pm, _ in self._parallel if any(id(p) in ids for p in pm.parameters())), None)
        made = super().prepare_optimizer(optimizer, device_placement)
        if owner is not None:
            made.__class__, made.pm = FullStateOptimizer, owner
        return made

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """As ``Accelerator.prepare_scheduler``; it steps once a step."""
        made = super().prepare_scheduler(scheduler)
        made.split_batches = True
        return made

    # ---- saving -----------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Full tensors. Under ``torchrun`` all ranks call it, and so ``save_model`` and ``save_state``."""
        if isinstance(model, ParallelModule):
            return model.full_state_dict()
        return super().get_state_dict(model, unwrap)

    @staticmethod
    def _load_models(models: list[nn.Module], folder: str) -> None:
        """Load parallel modules from what ``save_state`` wrote, and leave the others to accelerate.

        Raises:
            Error: a parallel module stands before another model, which would take its number.
        """
        for i in reversed(range(len(models))):
            pm, end = models[i], f"_{i}" if i else ""
            if isinstance(pm, ParallelModule):
                if i + 1 < len(models):
                    raise Error(
                        "models that are not parallel were prepared behind one that is",
                        where="accelerator.load_state(...)",
                        expected="parallel modules behind all others",
                        got=type(models[i + 1]).__name__,
                        remedy="prepare the parallel modules last",
                    )
                path = Path(folder, f"model{end}.safetensors")
                full = (
                    safetensors.torch.load_file(path)
                    if path.exists()
                    else torch.load(Path(folder, f"pytorch_model{end}.bin"), map_location="cpu", weights_only=True)
                )
                pm.load_full_state_dict(full)
                del models[i]
