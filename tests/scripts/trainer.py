"""transformers' ``Trainer``: text of uneven lengths, accumulation, clipping, decay of some parameters, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import shardfx as sx
from shardfx.integrations.trainer import ParallelTrainer

from . import on
from .text import LENGTH, VOCAB, Text, loss_in_float64

MESHES = sx.Mesh(dp=2), sx.Mesh(tp=2)
SPECS = {
    "transformer.wte.weight": "tp, -",
    "transformer.h.*.attn.c_attn.weight": "-, tp",
    "transformer.h.*.attn.c_proj.weight": "tp, -",
    "transformer.h.*.mlp.c_fc.weight": "-, tp",
    "transformer.h.*.mlp.c_proj.weight": "tp, -",
}


def make() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    undropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 4}
    config = GPT2Config(**sizes, **undropped, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).double()
    model.loss_function = loss_in_float64
    return model


class Noting:
    """Keeps the loss of every call and evaluation, in full precision; what a ``Trainer`` logs is float32."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.losses: list[float] = []
        super().__init__(*given, **options)

    def training_step(self, *given: Any, **options: Any) -> Tensor:
        loss: Tensor = super().training_step(*given, **options)  # type: ignore[misc]
        self.losses.append(loss.item())
        return loss

    def evaluate(self, *given: Any, **options: Any) -> dict[str, float]:
        metrics: dict[str, float] = super().evaluate(*given, **options)  # type: ignore[misc]
        self.losses.append(metrics["eval_loss"])
        return metrics


def arguments(folder: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )


def train(kind: Any, steps: int, folder: Path, **more: Any) -> list[float]:
    """``steps`` calls, of which two make a step of the optimizer; every second one is followed by an evaluation."""
    last = get_last_checkpoint(folder) if folder.exists() else None
    done = int(last.rpartition("-")[2]) if last else 0
    args = arguments(folder, done + steps // 2)
    trainer = kind(make(), args, train_dataset=Text(32), eval_dataset=Text(4), **more)
    trainer.train(resume_from_checkpoint=last)
    trainer._save_checkpoint(trainer.model, trial=None)
    losses: list[float] = trainer.losses
    return losses


class NotingTrainer(Noting, Trainer):  # type: ignore[misc]
    pass


class NotingParallelTrainer(Noting, ParallelTrainer):
    pass


def plain(steps: int, folder: Path) -> list[float]:
    return train(NotingTrainer, steps, folder)


def ported(mesh: sx.Mesh, steps: int, folder: Path) -> list[float]:
    return train(NotingParallelTrainer, steps, folder, mesh=mesh, hints=sx.Hints(specs=on(mesh, SPECS)))
