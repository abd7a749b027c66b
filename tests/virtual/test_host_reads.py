"""A step waits for no device: from the fifth step on the host reads no more than its own random generator."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.on_gpu import without_synchronisation

READS = ("item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__")
WARM, STEPS, MOST = 4, 3, 2
VOCAB, DIM, LENGTH, BATCH = 32, 16, 8, 4


class Mlp(nn.Module):
    """Dropout between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(F.gelu(self.up(x))))
        return out


class Gpt(nn.Module):
    """One block, with dropout of embeddings, attention and residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.norm, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp, self.head, self.dropout = Mlp(), nn.Linear(DIM, VOCAB, bias=False), nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device)))
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.proj(seen.transpose(1, 2).flatten(2)))
        out: Tensor = self.head(x + self.mlp(x))
        return out


def next_token(out: Any, labels: Tensor) -> Tensor:
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.float(), target)  # torch 2.11 has no gradient where dtypes differ


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 32, "num_local_experts": 4}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, max_position_embeddings=LENGTH, use_cache=False))


@dataclass(frozen=True)
class Trained:
    """A model, an example batch, and how it is planned."""

    model: Callable[[], nn.Module]
    example: tuple[Tensor, Tensor]
    loss: Callable[..., Tensor]
    specs: dict[str, str] = field(default_factory=dict)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(VOCAB, (BATCH, LENGTH)), torch.randint(VOCAB, (BATCH, LENGTH))


MODELS = {
    "mlp": Trained(Mlp, (torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)), squared_error, {"up.weight": "tp, -"}),
    "gpt": Trained(Gpt, tokens(), next_token, {"embed.weight": "tp, -", "head.weight": "tp, -"}),
    "mixtral": Trained(mixtral, tokens(), next_token, {"model.layers.*.mlp.experts.*_proj": "tp, -, -"}),
}
PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"clip_grad_norm": 1.0, "mixed_precision": torch.bfloat16},
    "scaled": {
        "clip_grad_norm": 1.0,
        "mixed_precision": sx.MixedPrecision(torch.float16, output_dtype=torch.float32, loss_scale=sx.LossScale()),
    },
}


def planned(name: str, device: str = "cpu", **hints: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    made = MODELS[name]
    x, y = made.example
    asked = sx.Hints(
        args=(x,), targets=(y,), loss=made.loss, specs={"args.0": "dp, -", **made.specs}, device=device, **hints
    )
    return sx.parallelize(made.model(), sx.Mesh(dp=2, tp=2), asked)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@contextmanager
def reads(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where the host reads a tensor, within."""
    found: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        plain = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append("".join(traceback.format_stack(limit=4)[:-1]))
            return plain(tensor, *args, **kwargs)

        return read

    with patch.context() as patched:
        for name in READS:
            patched.setattr(Tensor, name, noted(name))
        yield found


def steps(pm: sx.ParallelModule, batch: tuple[Tensor, Tensor]) -> Iterator[Callable[[], Any]]:
    """One step after the other, each with a rate of its own."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(pm.optimizer, 100)
    for _ in range(WARM + STEPS):
        yield lambda: pm.step(*batch)
        schedule.step()


def check_reads(found: list[str], count: int) -> None:
    assert len(found) <= MOST * count, "\n".join(dict.fromkeys(found))


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_host_reads_of_a_step_with_its_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pm = planned(name, optimizer=adamw, **PROGRAMS["scaled"])
    found: list[str] = []
    for number, step in enumerate(steps(pm, MODELS[name].example)):
        with reads(monkeypatch) as read:
            step()
        found += read if number >= WARM else []
    check_reads(found, STEPS)
    for rank in range(4):
        code = pm.rank_module(rank).code
        assert ".item(" not in code and ".tolist(" not in code


@pytest.mark.long
def test_host_reads_of_a_call_and_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer reads is its own."""
    name = "gpt"
    pm = planned(name)
    optimizer, found = adamw(pm.parameters()), []
    for number in range(WARM + STEPS):
        with reads(monkeypatch) as read:
            loss = pm(*MODELS[name].example)
            loss.backward()
            pm.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += read if number >= WARM else []
    check_reads(found, STEPS)


def batch_on(name: str, device: str) -> tuple[Tensor, Tensor]:
    x, y = MODELS[name].example
    return x.to(device), y.to(device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "program", "device"),
    [("mlp", "plain", "cuda"), ("gpt", "scaled", "cpu"), ("mixtral", "bfloat16", "cpu")],
)
def test_a_step_on_a_gpu_does_not_synchronise(name: str, program: str, device: str) -> None:
    """Also of a batch on the CPU."""
    pm, batch = planned(name, "cuda", optimizer=adamw, **PROGRAMS[program]), batch_on(name, device)
    for number, step in enumerate(steps(pm, batch)):
        with without_synchronisation() if number >= WARM else nullcontext():
            loss = step()
    assert loss.isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "compiled"), [("mixtral", False), ("mlp", True)])
def test_a_call_on_a_gpu_does_not_synchronise(name: str, compiled: bool) -> None:
    pm, batch = planned(name, "cuda", mixed_precision=torch.bfloat16), batch_on(name, "cuda")
    if compiled:
        pm.compile()
    for number in range(WARM + STEPS):
        with without_synchronisation() if number >= WARM else nullcontext():
            loss = pm(*batch)
            loss.backward()
            pm.clip_grad_norm_(1.0)
        pm.zero_grad()
    assert loss.isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_may_be_written_over_as_soon_as_a_call_returns(pinned: bool) -> None:
    """Also while the GPU has yet to begin with it."""
    pm, ones = planned("mlp", "cuda").eval(), torch.ones(BATCH, DIM, device="cuda")
    x = torch.ones(BATCH, DIM, pin_memory=pinned)
    with torch.no_grad():
        wanted = pm(ones, ones)
        torch.cuda._sleep(10**8)
        found = pm(x, ones)
        x.zero_()
        torch.testing.assert_close(found, wanted)
