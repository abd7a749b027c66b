"""The models of :mod:`.script_steps`, with the batches of all ranks, as scripts for DDP have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import GPT, Size, next_token

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A model and one batch for it: inputs by position or by name, and the loss of the results and the targets.

    Args:
        aim: of our time over DDP's.
        batch_stats, zero: of our plan (:class:`shardfx.Hints`); with ``zero=3`` it stands beside FSDP2.
    """

    model: nn.Module
    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    loss: Loss
    targets: tuple[Tensor, ...]
    aim: float = 1.2
    batch_stats: str | None = None
    zero: int = 0

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors by the names that hints have for them."""
        named = {f"args.{i}": x for i, x in enumerate(self.args)}
        named |= {f"kwargs.{name}": x for name, x in self.kwargs.items()}
        return named | {f"targets.{i}": x for i, x in enumerate(self.targets)}


def gpt(size: Size, aim: float, zero: int = 0) -> Case:
    x, y = torch.randint(size.vocab, (2, size.batch, size.length)).unbind()
    return Case(GPT(size), (x,), {}, next_token, (y,), aim, zero=zero)


def resnet(batch_stats: str | None, aim: float) -> Case:
    """A ResNet-18 for small images: 11 M parameters, 20 batch norms."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes, num_labels=10))
    x, y = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))

    def loss(out: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(out.logits, labels)

    return Case(model, (x,), {}, loss, (y,), aim, batch_stats)


def of_tokens(out: Any, labels: Tensor) -> Tensor:
    """The loss of a language model of Hugging Face."""
    return next_token(out.logits, labels)


def bert_tiny() -> Case:
    """Two layers of 128, as google/bert_uncased_L-2_H-128_A-2; a small vocabulary."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512}
    config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)
    x, y = torch.randint(1024, (2, 8, 64)).unbind()
    lengths = torch.arange(64 - 8, 64)
    mask = (torch.arange(64) < lengths[:, None]).long()
    return Case(BertForMaskedLM(config), (), {"input_ids": x, "attention_mask": mask}, of_tokens, (y,))


def gpt2_tiny() -> Case:
    """Two layers of 128, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 1024, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))
    x, y = torch.randint(1024, (2, 8, 64)).unbind()
    return Case(model, (), {"input_ids": x}, of_tokens, (y,))


TINY = Size(dim=64, layers=3, heads=4, length=64, batch=8, vocab=128)
SMALL = Size(dim=256, layers=3, heads=8, length=128, batch=8, vocab=512)
CASES: dict[str, Callable[[], Case]] = {
    "gpt-0.17m": lambda: gpt(TINY, 1.2),
    "gpt-0.17m, zero": lambda: gpt(TINY, 1.0, zero=3),
    "gpt-2.7m": lambda: gpt(SMALL, 1.0),
    "gpt-2.7m, zero": lambda: gpt(SMALL, 1.0, zero=3),
    "resnet18, local": lambda: resnet("local", 1.0),
    "resnet18, whole": lambda: resnet(None, 1.2),
    "bert-tiny": bert_tiny,
    "gpt2-tiny": gpt2_tiny,
}
"""By name; the models are those of seed 0."""
