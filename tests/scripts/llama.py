"""A loop for transformers' Llama: padded text with a mask, ignored labels, the mean over the tokens of several
batches. (Its norms and rotations are in float32, whatever the model is in.)"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import shardfx as sx

from . import is_first, on, save, saved
from .text import IGNORED, LENGTH, VOCAB, Text, loss_in_float64

MESHES = sx.Mesh(dp=2), sx.Mesh(tp=2)
SPECS = {
    "kwargs.input_ids": "dp, -",
    "kwargs.attention_mask": "dp, -",
    "kwargs.labels": "dp, -",
    "**.q_proj.weight": "tp, -",
    "**.k_proj.weight": "tp, -",
    "**.v_proj.weight": "tp, -",
    "**.o_proj.weight": "-, tp",
    "**.gate_proj.weight": "tp, -",
    "**.up_proj.weight": "tp, -",
    "**.down_proj.weight": "-, tp",
}
ACCUMULATED = 2


def begin(folder: Path) -> tuple[LlamaForCausalLM, torch.optim.Optimizer, int]:
    """From scratch, or from the checkpoint; the same for both."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    checkpoint = saved(folder)
    config = LlamaConfig(**sizes, **heads, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = LlamaForCausalLM(config) if not checkpoint else LlamaForCausalLM.from_pretrained(folder)
    model = model.double().train()
    model.loss_function = loss_in_float64
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer, checkpoint.get("step", 0)


def batches(done: int, steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """Those of each step."""
    every = list(DataLoader(Text(4 * ACCUMULATED * (done + steps)), batch_size=4))
    return [every[i * ACCUMULATED :][:ACCUMULATED] for i in range(done, done + steps)]


def plain(steps: int, folder: Path) -> list[float]:
    model, optimizer, done = begin(folder)
    losses = []
    for together in batches(done, steps):
        count = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in together)
        for batch in together:
            loss = model(**batch, num_items_in_batch=count).loss
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    save({"step": done + steps, "optimizer": optimizer.state_dict()}, folder)
    return losses


def ported(mesh: sx.Mesh, steps: int, folder: Path) -> list[float]:
    model, optimizer, done = begin(folder)
    kwargs = {**batches(0, 1)[0][0], "num_items_in_batch": torch.tensor(1)}
    hints = sx.Hints(kwargs=kwargs, loss=lambda out: out.loss, specs=on(mesh, SPECS))
    pm = sx.parallelize(model, mesh, hints, optimizer=optimizer)
    losses = []
    for together in batches(done, steps):
        count = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in together)
        for batch in together:
            loss = pm(**batch, num_items_in_batch=count)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with pm.gathered() as whole:
        whole.save_pretrained(folder, is_main_process=is_first())
    save({"step": done + steps, "optimizer": pm.full_optimizer_state_dict(optimizer)}, folder)
    return losses
