"""transformers' ``Trainer`` on a parallel module.

To the ``Trainer`` the whole mesh is one device: ``per_device_train_batch_size`` is the mesh's, every process reads the
global batch, and a step, a metric, a logged loss is what one device gives. What is saved is unsharded: transformers
loads it, and training resumes from it under any other plan, or by a plain ``Trainer``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardfx.api import parallelize
from shardfx.hints import Hints
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.module.optimizer_states import carry_over
from shardfx.module.parallel_module import ParallelModule
from shardfx.plan import PlannedSpecs
from shardfx.runtime.store import version

from .accelerate import ParallelAccelerator

COUNT = "num_items_in_batch"


class ParallelTrainer(Trainer):
    """A ``Trainer`` whose model is parallel over a mesh::

        trainer = ParallelTrainer(model, args, mesh=sx.Mesh(dp=2, tp=2), hints=sx.Hints(specs=...), train_dataset=...)
        trainer.train()
        trainer.evaluate()
        trainer.save_model(folder)

    ``trainer.model`` has the trained weights after ``train()``; during it, ``trainer.model_wrapped`` is the parallel
    module. ``predict`` without labels runs the model with full weights on every rank. Where workers of a data loader
    draw random numbers, ranks draw others: ``sx.Hints(check_inputs="broadcast")`` takes the first rank's batches.

    Args:
        mesh: as for :func:`shardfx.parallelize`.
        hints: how values are sharded, and more; inputs, targets and loss are those of the trainer's batches. Names of
            the inputs are ``kwargs.input_ids`` and the like.
        data: mesh axes (major first, as in ``"dp ep"``) over which the batch is sharded, where ``hints`` do not say
            otherwise; by default ``dp``, if there is such an axis.
        given, options: those of ``Trainer``.

    Raises:
        Error: hints name inputs or a loss; the model cannot be planned; an axis that the mesh has not.
    """

    model: Any
    optimizer: Any

    def __init__(
        self, *args: Any, mesh: Mesh, hints: Hints | None = None, data: str | None = None, **options: Any
    ) -> None:
        self._mesh, self._given = mesh, hints if hints is not None else Hints()
        if self._given.args or self._given.kwargs or self._given.targets or self._given.loss is not None:
            raise Error(
                "a trainer's batches are the inputs of its model, and say its loss",
                where="ParallelTrainer(..., hints=...)",
                expected="hints without args, kwargs, targets and loss",
                got=", ".join(n for n in ("args", "kwargs", "targets", "loss") if getattr(self._given, n)),
                remedy="leave them out; a loss of your own is compute_loss_func",
            )
        own = "dp" if any(axis.name == "dp" for axis in mesh.axes) else ""
        self._data = own if data is None else data
        self._pm: ParallelModule | None = None
        self._made_of: nn.Module | None = None
        self._version = 0
        super().__init__(*args, **options)

    # ---- the model --------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As the ``Trainer``'s, for a mesh that is one device."""
        super().create_accelerator_and_postprocess()
        self.accelerator = ParallelAccelerator.taking_over(self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics
        _ = self.args.device
        self.args._n_gpu = min(self.args.n_gpu, 1)  # no DataParallel, whose batch would be that of all GPUs

    def get_total_train_batch_size(self, args: Any) -> int:
        """The rows of a step: every process reads all of them."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        own: nn.Module = self.model
        if self._pm is None or self._made_of is not own:
            self._pm = self._parallelize()
        elif training and self._version != version_of(own):
            self._pm.load_full_state_dict(own.state_dict())
        self._version = version_of(own)
        if training and self.optimizer is not None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            carry_over(optimizer, own, self._pm._state)
        return self._pm

    def _parallelize(self) -> ParallelModule:
        with random_numbers_kept():
            batch = self._prepare_inputs(self._first_batch())
        kwargs, targets = self._call(batch, self._get_num_items_in_batch([batch], self.args.device))
        rows = next((t.shape[0] for t in batch.values() if isinstance(t, torch.Tensor) and t.dim()), 0)
        named = {f"kwargs.{name}": each for name, each in kwargs.items()}
        named |= {f"targets.{i}": each for i, each in enumerate(targets)}
        specs = {
            name: ", ".join([self._data] + ["-"] * (each.dim() - 1))
            for name, each in named.items()
            if self._data and isinstance(each, torch.Tensor) and each.dim() and each.shape[0] == rows
        }
        given = self._given.specs
        said = given if isinstance(given, PlannedSpecs) else {**specs, **given}
        hints = replace(self._given, kwargs=kwargs, targets=targets, loss=self._loss(), specs=said)
        self.model.train()
        with self.compute_loss_context_manager():
            pm = parallelize(self.model, self._mesh, hints)
        self._made_of = self.model
        self.accelerator.hold(pm)
        return pm

    def _first_batch(self) -> dict[str, Any]:
        loader = self.get_train_dataloader() if self.train_dataset is not None else self.get_eval_dataloader()
        batch: dict[str, Any] = next(iter(getattr(loader, "base_dataloader", loader)))
        return batch

    # ---- the loss ---------------------------------------------------------------------------------------------

    def _call(self, inputs: Mapping[str, Any], count: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The inputs of the model, and those of a loss that is not the model's own."""
        kwargs = dict(inputs)
        outside = self.compute_loss_func is not None or self.label_smoother is not None
        targets = (kwargs.pop("labels"), count) if outside and "labels" in kwargs else ()
        if self.model_accepts_loss_kwargs and count is not None:
            kwargs[COUNT] = count
        return kwargs, targets

    def _loss(self) -> Callable[..., Any]:
        own, smoother = self.compute_loss_func, self.label_smoother
        widened = convert_to_fp32 if self.accelerator.native_amp else lambda out: out
        if own is not None:
            return lambda out, labels=None, count=None: own(widened(out), labels, num_items_in_batch=count)
        if smoother is not None:
            shifted = type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            return lambda out, labels, count: smoother(
                widened(out), labels, shift_labels=shifted, num_items_in_batch=count
            )
        return lambda out: out["loss"] if isinstance(out, dict) else out[0]

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """The autocast context of ``bf16=True``, around the calls of the parallel module."""
        return self.accelerator.autocast()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the ``Trainer``'s: the loss of the global batch, and the model's outputs beside it."""
        kwargs, targets = self._call(inputs, num_items_in_batch)
        if not return_outputs:
            return model(*targets, **kwargs)
        loss, out = model(*targets, with_results=True, **kwargs)
        return loss, convert_to_fp32(out) if self.accelerator.native_amp else out

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """As the ``Trainer``'s. Without labels there is no such plan, and the model itself is called."""
        if self._pm is None or all(inputs.get(name) is not None for name in self.label_names):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with self._pm.gathered() as full:
            return super().prediction_step(full.eval(), inputs, prediction_loss_only, ignore_keys)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        found = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        return found.full_tensor() if isinstance(found, DTensor) else found

    # ---- saving and loading -----------------------------------------------------------------------------------

    def train(self, *args: Any, **options: Any) -> Any:
        """As the ``Trainer``'s; afterwards ``trainer.model`` has the trained weights."""
        result = super().train(*args, **options)
        if self._pm is not None:
            with self._pm.gathered() as full:
                self.model.load_state_dict(full.state_dict())
            self._version = version_of(self.model)
        return result

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._pm is not None and state_dict is None:
            with self._pm.gathered() as full:
                state_dict = full.state_dict()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save:
            self.optimizer.state_dict()  # a collective: the other ranks take part
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._pm is not None:
            self._pm.load_full_state_dict(self.model.state_dict())


def version_of(model: nn.Module) -> int:
    """Another number after each time that something was written into its parameters."""
    return sum(version(parameter) for parameter in model.parameters())


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Within, random numbers may be drawn, and those that follow are as if none had been."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
