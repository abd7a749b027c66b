"""Decoders whose attention is written out (Gemma2: soft caps; gpt-oss: sinks), and one of one's own, by each strategy
of context parallelism compared with one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step
from tests.virtual.test_attention_windows import PROJECTIONS, largest, logits

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}


class Own(nn.Module):
    """A decoder layer that writes its causal attention out, with sinks and a soft cap."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(32, 16, bias=False) for _ in range(2))
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        scores = torch.tanh(torch.matmul(q, k.mT) / math.sqrt(8) / 3.0) * 3.0
        rows = torch.arange(x.shape[1])
        scores = scores.masked_fill(rows > rows[:, None], -torch.inf)
        sinks = self.sinks[:, None, None].expand(x.shape[0], -1, x.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(48, 32), nn.ModuleList([Own(), Own()]), nn.Linear(32, 48)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def decoder(name: str) -> nn.Module:
    """Of two layers, the first one (of transformers' models) with a window of four keys."""
    torch.manual_seed(0)
    if name == "own":
        return OwnModel().double().train()
    if name == "gemma2":
        config = transformers.Gemma2Config(sliding_window=4, attn_logit_softcapping=5.0, use_cache=False, **SIZES)
        made = transformers.Gemma2ForCausalLM(config)
    else:
        config = transformers.GptOssConfig(
            sliding_window=4, num_local_experts=2, num_experts_per_tok=1, use_cache=False, **SIZES
        )
        made = transformers.GptOssForCausalLM(config)
        made.set_experts_implementation("batched_mm")  # which takes float64
        for layer in made.model.layers:
            nn.init.normal_(layer.self_attn.sinks)
    for name, norm in [*made.named_modules()]:
        if name.endswith("norm"):  # their own compute in float32
            made.set_submodule(name, nn.RMSNorm(norm.weight.shape, config.rms_norm_eps))
    return made.double().train()


def loss(out: Any) -> Tensor:
    return out.square().mean() if isinstance(out, Tensor) else logits(out)


@pytest.fixture
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma2's softmax is one of float32."""
    softmax = nn.functional.softmax

    def wide(x: Tensor, dim: int, **_: Any) -> Tensor:
        return softmax(x, dim)

    monkeypatch.setattr(nn.functional, "softmax", wide)


CASES: dict[str, tuple[sx.Mesh, dict[str, Any], int]] = {
    "gather": (sx.Mesh(cp=3), {"args.0": "-, cp", "ATTENTION": sx.Context("cp", "gather")}, 13),
    "all-to-all": (sx.Mesh(cp=4), {"args.0": "-, cp", "ATTENTION": sx.Context("cp", "all-to-all")}, 14),
    "window": (sx.Mesh(cp=2), {"args.0": "-, cp", "ATTENTION": sx.Context("cp")}, 22),
    "ring": (sx.Mesh(cp=3), {"args.0": "-, cp", "ATTENTION": sx.Context("cp", "ring")}, 12),
    "2d": (sx.Mesh(r=2, u=2), {"args.0": "-, r u", "ATTENTION": sx.Context("r u", "2d")}, 12),
    "no context": (sx.Mesh(cp=3), {"args.0": "-, cp"}, 13),
    "dp, tp": (sx.Mesh(dp=2, tp=2), {"args.0": "dp, -", "PROJECTIONS": ""}, 11),
}


@pytest.mark.long
@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "own"])
@pytest.mark.parametrize("case", CASES)
def test_written_attention_matches_single_device(name: str, case: str) -> None:
    mesh, specs, length = CASES[case]
    model, ids = decoder(name), torch.randint(1, 48, (2, length))
    attention = "layers.*" if name == "own" else "**.self_attn"
    found = {attention if text == "ATTENTION" else text: each for text, each in specs.items()}
    if found.pop("PROJECTIONS", None) is not None:
        found |= (
            PROJECTIONS
            if name != "own"
            else {
                text.replace("model.", "").replace("self_attn.", "").replace("_proj", ""): each
                for text, each in PROJECTIONS.items()
            }
        )
    pm = sx.parallelize(model, mesh, sx.Hints(args=(ids,), loss=loss, specs=found), virtual=True)
    check_step(pm, model, loss, (ids,), bound=1e-12)
    attends = [node for node in pm.captured.nodes if str(node.op) == "shardfx.attention.default"]
    assert len(attends) == 2 and all(node.operands[1].shape[1] == 2 for node in attends)
    assert [node.kwargs.get("window") for node in attends] == [[3, 0] if name != "own" else None, None]
    assert {node.kwargs.get("softcap") for node in attends} == {{"gemma2": 5.0, "own": 3.0}.get(name)}
    assert all(("sinks" in node.kwargs) is (name != "gemma2") for node in attends)
    assert largest(pm.captured, length) == largest(pm.planned, length) == 0


@pytest.mark.long
@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
@pytest.mark.parametrize("how", ["gather", "all-to-all", "ring", "auto"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_padded_written_attention_matches_single_device(name: str, how: str) -> None:
    """With sinks, a query that sees no key gets zeros. Without, it gets the mean of all values, by finite numbers: that
    is another attention, whose scores are flat."""
    model, ids, kept = decoder(name), torch.randint(1, 48, (2, 18)), torch.ones(2, 18, dtype=torch.int64)
    kept[0, :3] = kept[1, -2:] = 0
    specs: dict[str, Any] = {"args.*": "-, cp", "**.self_attn": sx.Context("cp", how)}
    pm = sx.parallelize(model, sx.Mesh(cp=2), sx.Hints(args=(ids, kept), loss=logits, specs=specs), virtual=True)
    check_step(pm, model, logits, (ids, kept), bound=1e-12)
    attends = [node for node in pm.captured.nodes if str(node.op) == "shardfx.attention.default"]
    assert sum("flat" in node.kwargs for node in attends) == (2 if name == "gemma2" else 0)
    assert all("q_ids" in node.kwargs for node in attends) and largest(pm.captured, 18) == largest(pm.planned, 18) == 0
