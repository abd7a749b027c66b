"""A file of this repository as tokens: its bytes, in samples of different lengths, padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

ROOT = Path(__file__).parents[2]
VOCAB, LENGTH, IGNORED = 128, 12, -100


class Text(Dataset[dict[str, Tensor]]):
    """Sample ``i`` has up to ``LENGTH`` bytes; labels are ignored where it is padded, and in its beginning."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.tokens = torch.tensor(list((ROOT / "LICENSE").read_bytes())) % VOCAB

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = self.tokens[2000 + i * LENGTH :][:LENGTH].clone()
        mask = (torch.arange(LENGTH) < LENGTH - i % 7).long()
        labels = torch.where((mask > 0) & (torch.arange(LENGTH) >= i % 3), tokens, IGNORED)
        return {"input_ids": torch.where(mask > 0, tokens, 0), "attention_mask": mask, "labels": labels}


def loss_in_float64(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """As transformers' own, which casts logits to float32."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else (labels != IGNORED).sum())
