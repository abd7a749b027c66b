"""transformers' ``Trainer`` on parallel modules: it logs, measures, predicts and saves what one device gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import EvalPrediction, PreTrainedConfig, Trainer

import shardfx as sx
from shardfx.integrations.trainer import ParallelTrainer
from tests.scripts.text import IGNORED, VOCAB, Text
from tests.scripts.trainer import arguments, make

TIMES = ("_runtime", "_per_second", "_flos", "_preparation_time")


class Small(nn.Module):
    """No model of transformers: plain PyTorch that gives its loss, by the mean of a batch's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig()  # what smoothing asks for
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids) * attention_mask[..., None])
        found = {} if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}
        return found | {"logits": logits}


def small() -> Small:
    torch.manual_seed(0)
    return Small().double()


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def accuracy(given: EvalPrediction) -> dict[str, float]:
    labels = given.label_ids[:, 1:]
    right = given.predictions.argmax(-1)[:, :-1] == labels
    return {"accuracy": float(right[labels != IGNORED].mean()), "rows": float(len(labels))}


class WithoutLabels(Text):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: each for name, each in super().__getitem__(i).items() if name != "labels"}


def made(kind: Any, folder: Path, more: dict[str, Any], **options: Any) -> Trainer:
    args = replace(arguments(folder, 4), **{"gradient_accumulation_steps": 1, **more})
    given = {"model": make(), "train_dataset": Text(8), "eval_dataset": Text(4), "compute_metrics": accuracy}
    return kind(args=args, **given | options)


def close(ours: Any, theirs: Any) -> None:
    """Of texts, numbers and arrays; times aside."""
    if isinstance(ours, dict):
        counted = {name for name in theirs if not name.endswith(TIMES)}
        assert counted == {name for name in ours if not name.endswith(TIMES)}
        for name in counted:
            close(ours[name], theirs[name])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            close(a, b)
    elif isinstance(ours, (float, np.ndarray)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)  # what is logged is float32
    else:
        assert ours == theirs


MORE = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
MORE |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}


@pytest.mark.long
def test_checkpoints_of_a_plain_trainer_are_gone_on_with(tmp_path: Path) -> None:
    kinds = (Trainer, ParallelTrainer)
    on = {ParallelTrainer: {"mesh": sx.Mesh(tp=2), "hints": sx.Hints(specs={"head.weight": "tp, -"})}, Trainer: {}}
    first = made(kinds[0], tmp_path, {"save_strategy": "steps", "save_steps": 2}, model=small(), **on[kinds[0]])
    first.train()
    second = made(kinds[1], tmp_path, {}, model=small(), **on[kinds[1]])
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    close(first.state.log_history[:4], second.state.log_history[:4])


@pytest.mark.long
def test_losses_of_ones_own(tmp_path: Path) -> None:
    def own(out: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        wanted = torch.where(labels == IGNORED, 0, labels)[..., None]
        return -out["logits"].log_softmax(-1).gather(-1, wanted)[..., 0].where(labels != IGNORED, 0.0).sum() / (
            num_items_in_batch
        )

    smoothed: dict[str, Any] = {"label_smoothing_factor": 0.1}
    for rows, more, options in ((7, smoothed, {}), (4, {}, {"compute_loss_func": own})):
        found = []
        for kind, mesh in ((Trainer, {}), (ParallelTrainer, {"mesh": sx.Mesh(dp=2)})):
            data = {"train_dataset": Text(rows), "eval_dataset": Text(rows), "model": small()}
            trainer = made(kind, tmp_path, {"gradient_accumulation_steps": 2, **more}, **data, **options, **mesh)
            trainer.train()
            found.append([trainer.state.log_history, trainer.evaluate(), trainer.predict(WithoutLabels(3)).predictions])
        close(*found)


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Text(16)[i] for i in range(16))


def own_optimizer(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


OPTIONS: dict[str, Any] = {
    "an optimizer": ({"eval_on_start": True, "eval_accumulation_steps": 1}, {"optimizers": own_optimizer}),
    "a stream": ({}, {"train_dataset": Stream()}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_trainer_under_zero_3(name: str, tmp_path: Path) -> None:
    more, options = OPTIONS[name]
    zero = {"mesh": sx.Mesh(dp=2), "hints": sx.Hints(zero=3, zero_min_numel=0)}
    logged = []
    for kind, mesh in ((Trainer, {}), (ParallelTrainer, zero)):
        model = small()
        given = {n: each(model) if n == "optimizers" else each for n, each in options.items()}
        trainer = made(kind, tmp_path, {"eval_strategy": "no", **more}, model=model, **given, **mesh)
        trainer.train()
        logged.append(trainer.state.log_history)
    close(*logged)


def test_several_gpus_are_one_device_and_compiling_is_refused(tmp_path: Path) -> None:
    args = replace(arguments(tmp_path, 4), eval_strategy="no")
    _, args._n_gpu = args.device, 3
    trainer = ParallelTrainer(small(), args, mesh=sx.Mesh(dp=2), train_dataset=Text(8))
    assert args.train_batch_size == args.per_device_train_batch_size and trainer._pm is None
    AcceleratorState._reset_state(True)
    with pytest.raises(sx.Error, match=r"torch.compile is asked for of accelerate(.|\n)*pm.compile"):
        ParallelTrainer(small(), replace(args, torch_compile=True), mesh=sx.Mesh(dp=2), train_dataset=Text(8))


@pytest.mark.long
def test_axes_and_hints_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sx.Error, match="batch"):
        made(ParallelTrainer, tmp_path, {}, model=small(), mesh=sx.Mesh(dp=2), data="batch").train()
    trainer = made(ParallelTrainer, tmp_path, {}, model=small(), mesh=sx.Mesh(a=2, b=2), data="a b")
    trainer.evaluate()
    assert str(trainer._wrap_model(trainer.model).planned.input("kwargs.input_ids").value.spec) == "[.{a,b}, .]"
    with pytest.raises(sx.Error, match="a trainer's batches are the inputs of its model"):
        made(ParallelTrainer, tmp_path, {}, mesh=sx.Mesh(dp=2), hints=sx.Hints(loss=torch.sum))
