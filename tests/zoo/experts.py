"""Mixtures of experts: unedited ones of transformers, which sort their tokens by expert, and two written by hand.

A product by group has no kernel for float64 on one device: there transformers' loop over the experts is the truth.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import DIM, HEADS, HIDDEN, KV_HEADS, LENGTH, VOCAB

from .cases import FLOAT32_INSIDE, Case, case, hf_next_token, labels, next_token, tokens

EXPERTS, CHOSEN = 4, 2


def loop_over_experts(model: Any) -> None:
    """Let a model of transformers compute its experts one after the other."""
    model.set_experts_implementation("eager")


def _sorted(name: str, config_type: Any, model_type: Any, **more: Any) -> Case:
    config = config_type(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=LENGTH,
        use_cache=False,
        **more,
    )
    layer = "model.layers.*."
    specs = {"model.embed_tokens.weight": "tp, -", "lm_head.weight": "tp, -"}
    specs |= {f"{layer}self_attn.{p}_proj.weight": "tp, -" for p in "qkv"}
    specs |= {f"{layer}self_attn.o_proj.weight": "-, tp", f"{layer}mlp.experts.gate_up_proj": "-, tp, -"}
    specs |= {f"{layer}mlp.experts.down_proj": "-, -, tp"}
    by_expert = {f"{layer}mlp.experts.{weight}": "ep, -, -" for weight in ("gate_up_proj", "down_proj")}
    model = model_type(config).train()
    return Case(
        name,
        model,
        (tokens(),),
        {},
        hf_next_token,
        (labels(),),
        specs,
        expert_specs=by_expert,
        alone=loop_over_experts,
        **FLOAT32_INSIDE,
    )


@case
def moe_mixtral() -> Case:
    """Mixtral: every second layer's tokens are sorted by expert, over the whole batch."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"intermediate_size": HIDDEN, "num_local_experts": EXPERTS, "num_hidden_layers": 2}
    return _sorted("moe_mixtral", MixtralConfig, MixtralForCausalLM, **sizes)


@case
def moe_qwen2() -> Case:
    """Qwen2-MoE: one expert more that all tokens share."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": HIDDEN, "num_hidden_layers": 1}
    return _sorted("moe_qwen2", Qwen2MoeConfig, Qwen2MoeForCausalLM, num_experts=EXPERTS, **sizes)


@case
def moe_qwen3() -> Case:
    """Qwen3-MoE: norms on queries and keys, and more experts than ranks."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"moe_intermediate_size": 32, "head_dim": DIM // HEADS, "num_hidden_layers": 1}
    return _sorted("moe_qwen3", Qwen3MoeConfig, Qwen3MoeForCausalLM, num_experts=6, **sizes)


class LoopOfExperts(nn.Module):
    """Every expert computes every token; what was not chosen is weighted by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        return out


class SlotsOfExperts(nn.Module):
    """Each expert has so many slots; a token takes the next free one, or is dropped. Weights are stacked."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)
        self.slots = slots

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.gate(rows).softmax(-1).max(-1)
        of_expert = F.one_hot(chosen, EXPERTS)
        place = (of_expert.cumsum(0) - 1) * of_expert
        taken = of_expert * (place < self.slots)
        slot = F.one_hot(place.clamp(max=self.slots - 1), self.slots) * taken[..., None]
        sent = torch.einsum("tes,td->esd", slot.to(x.dtype), rows)
        made = torch.einsum("esh,ehd->esd", F.gelu(torch.einsum("esd,edh->esh", sent, self.up)), self.down)
        return torch.einsum("tes,esd->td", slot * weight[:, None, None], made).view_as(x)


class ExpertsLM(nn.Module):
    """A layer of experts between an embedding and a head."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.tok_emb, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.moe = experts
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_emb(ids)
        return self.head(x + self.moe(self.norm(x)))


@case
def moe_loop() -> Case:
    """Experts in a Python loop, each with weights of its own."""
    specs = {"moe.experts.*.0.weight": "tp, -", "moe.experts.*.0.bias": "tp", "moe.experts.*.2.weight": "-, tp"}
    return Case("moe_loop", ExpertsLM(LoopOfExperts()), (tokens(),), {}, next_token, (labels(),), specs)


@case
def moe_slots() -> Case:
    """Experts with a capacity, tokens sent by products with a mask; some tokens are dropped."""
    specs = {"moe.up": "-, -, tp", "moe.down": "-, tp, -"}
    by_expert = {"moe.up": "ep, -, -", "moe.down": "ep, -, -"}
    model = ExpertsLM(SlotsOfExperts(slots=24))
    return Case("moe_slots", model, (tokens(),), {}, next_token, (labels(),), specs, expert_specs=by_expert)
