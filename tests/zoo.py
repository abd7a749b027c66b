"""The models users have, each with inputs, a loss and the hints of somebody who knows Megatron-LM.

    >>> case = make("llama")
    >>> case.loss(case.model(*case.args, **case.kwargs), *case.targets)

Everything is float64, so that a wrong program is told from a rounded one. Two traps are set on purpose:
the ignored tokens (-100) fall unevenly over the batch, so that a mean of per-rank means is visibly wrong, and
the number of key-value heads is half the number of heads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import DIM, HEADS, HIDDEN, KV_HEADS, LENGTH, VOCAB

BATCH = 8
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One model and one training step of it, on one device.

    ``megatron_specs`` and ``sequence_specs`` are hints over the mesh axis ``tp``; the tests add those of the data.
    What ``tests.reference.rel_err`` may reach between two orders of summation: ``tolerance`` for outputs, losses,
    gradients and buffers, ``trained_tolerance`` for the parameters after three steps of AdamW.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[..., Tensor]
    targets: tuple[Any, ...]
    megatron_specs: Mapping[str, str] = field(default_factory=dict)
    sequence_specs: Mapping[str, str] | None = None
    tolerance: float = 1e-9
    trained_tolerance: float = 1e-9


# Transformers computes rotary tables and RMS norms in float32 whatever the model's dtype. A program that sums a norm
# in another order is off by 4e-7 in the gradients, and where a gradient is tiny AdamW makes 1e-3 of it (Qwen3).
FLOAT32_INSIDE = {"tolerance": 1e-5, "trained_tolerance": 1e-2}

CASES: dict[str, Callable[[], Case]] = {}


def make(name: str) -> Case:
    """The case of that name, the same in every process and at every call."""
    return CASES[name]()


def _case(function: Callable[[], Case]) -> Callable[[], Case]:
    def build() -> Case:
        with _double():
            return function()

    build.__name__ = function.__name__
    build.__doc__ = function.__doc__
    CASES[function.__name__] = build
    return build


@contextmanager
def _double() -> Iterator[None]:
    """Default dtype float64 and a fixed seed, both put back at the end; transformers talks of real errors only."""
    logger = logging.getLogger("transformers")
    before, level = torch.get_default_dtype(), logger.level
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            logger.setLevel(level)


# ---- losses and data


def classify(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def hf_next_token(out: Any, labels: Tensor) -> Tensor:
    return next_token(out.logits, labels)


def hf_classify(out: Any, labels: Tensor) -> Tensor:
    return classify(out.logits, labels)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, LENGTH))


def labels() -> Tensor:
    """Sample 0 keeps one token, the later ones more and more: no two ranks see the same count."""
    out = torch.randint(0, VOCAB, (BATCH, LENGTH))
    for sample in range(BATCH):
        out[sample, 1 + 2 * sample :] = IGNORED
    return out


# ---- own models


@_case
def mlp3() -> Case:
    """Three Linears with biases, and ReLU."""
    from tests.models import MLP3

    x, y = torch.randn(BATCH, 32), torch.randint(0, 16, (BATCH,))
    specs = {"fc1.weight": "tp, -", "fc1.bias": "tp", "fc2.weight": "-, tp"}
    return Case("mlp3", MLP3(), (x,), {}, classify, (y,), specs)


@_case
def dropout_mlp() -> Case:
    """The same with dropout on."""
    from tests.models import MLP3

    x, y = torch.randn(BATCH, 32), torch.randint(0, 16, (BATCH,))
    specs = {"fc1.weight": "tp, -", "fc1.bias": "tp", "fc2.weight": "-, tp"}
    return Case("dropout_mlp", MLP3(dropout=0.25), (x,), {}, classify, (y,), specs)


_GPT_SPECS = {
    "tok_emb.weight": "tp, -",
    "layers.*.proj.weight": "-, tp",
    "layers.*.fc1.weight": "tp, -",
    "layers.*.fc1.bias": "tp",
    "layers.*.fc2.weight": "-, tp",
    "head.weight": "tp, -",
}
_GPT_SEQUENCE = {"layers.*.ln1": "-, tp, -", "layers.*.ln2": "-, tp, -", "ln_f": "-, tp, -"}


@_case
def gpt_fused() -> Case:
    """A GPT whose q, k and v come from one Linear: its cut does not fall between q, k and v."""
    from tests.models import GPT

    specs = {**_GPT_SPECS, "layers.*.qkv.weight": "tp, -", "layers.*.qkv.bias": "tp"}
    return Case("gpt_fused", GPT(fused=True), (tokens(),), {}, next_token, (labels(),), specs, _GPT_SEQUENCE)


@_case
def gpt_separate() -> Case:
    """A GPT with three Linears for q, k and v."""
    from tests.models import GPT

    specs = dict(_GPT_SPECS)
    for name in "qkv":
        specs |= {f"layers.*.{name}.weight": "tp, -", f"layers.*.{name}.bias": "tp"}
    return Case("gpt_separate", GPT(fused=False), (tokens(),), {}, next_token, (labels(),), specs, _GPT_SEQUENCE)


@_case
def llama() -> Case:
    """RMS norm, rotary positions, grouped queries, SwiGLU."""
    from tests.models import Llama

    specs = {"tok_emb.weight": "tp, -", "head.weight": "tp, -"}
    specs |= {f"layers.*.{name}.weight": "tp, -" for name in ("wq", "wk", "wv", "w1", "w3")}
    specs |= {f"layers.*.{name}.weight": "-, tp" for name in ("wo", "w2")}
    sequence = {"layers.*.attn_norm": "-, tp, -", "layers.*.mlp_norm": "-, tp, -", "norm": "-, tp, -"}
    return Case("llama", Llama(), (tokens(),), {}, next_token, (labels(),), specs, sequence)


@_case
def resnet() -> Case:
    """Residual blocks with batch norm in training mode: its statistics are those of the whole batch."""
    from tests.models import ResNet

    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 16, (BATCH,))
    specs = {
        "blocks.*.conv1.weight": "tp, -, -, -",
        "blocks.*.bn1.weight": "tp",
        "blocks.*.bn1.bias": "tp",
        "blocks.*.conv2.weight": "-, tp, -, -",
    }
    return Case("resnet", ResNet(), (x,), {}, classify, (y,), specs)


@_case
def unet() -> Case:
    """Down, up and across; one label a pixel."""
    from tests.models import UNet

    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 4, (BATCH, 32, 32))
    specs = {
        "**.conv1.weight": "tp, -, -, -",
        "**.conv1.bias": "tp",
        "**.norm1.weight": "tp",
        "**.norm1.bias": "tp",
        "**.conv2.weight": "-, tp, -, -",
    }
    return Case("unet", UNet(), (x,), {}, classify, (y,), specs)


# ---- Hugging Face models, unedited, from configurations (nothing is downloaded)


def _gpt2(name: str, dropout: float) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=DIM,
        n_layer=2,
        n_head=HEADS,
        n_inner=HIDDEN,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    # Conv1D keeps its weight as [in, out].
    specs = {
        "transformer.wte.weight": "tp, -",
        "transformer.h.*.attn.c_attn.weight": "-, tp",
        "transformer.h.*.attn.c_attn.bias": "tp",
        "transformer.h.*.attn.c_proj.weight": "tp, -",
        "transformer.h.*.mlp.c_fc.weight": "-, tp",
        "transformer.h.*.mlp.c_fc.bias": "tp",
        "transformer.h.*.mlp.c_proj.weight": "tp, -",
    }
    sequence = {f"transformer.{norm}": "-, tp, -" for norm in ("h.*.ln_1", "h.*.ln_2", "ln_f")}
    model = GPT2LMHeadModel(config).train()
    return Case(name, model, (tokens(),), {}, hf_next_token, (labels(),), specs, sequence)


@_case
def hf_gpt2() -> Case:
    """GPT-2: the head is tied to the embedding."""
    return _gpt2("hf_gpt2", dropout=0.0)


@_case
def hf_gpt2_dropout() -> Case:
    """GPT-2 with all of its dropouts on."""
    return _gpt2("hf_gpt2_dropout", dropout=0.1)


def _decoder(name: str, config_type: Any, model_type: Any, **more: Any) -> Case:
    config = config_type(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LENGTH,
        use_cache=False,
        **more,
    )
    layer = "model.layers.*."
    specs = {"model.embed_tokens.weight": "tp, -", "lm_head.weight": "tp, -"}
    specs |= {f"{layer}self_attn.{p}_proj.weight": "tp, -" for p in "qkv"}
    specs |= {f"{layer}mlp.{p}_proj.weight": "tp, -" for p in ("gate", "up")}
    specs |= {f"{layer}self_attn.o_proj.weight": "-, tp", f"{layer}mlp.down_proj.weight": "-, tp"}
    norms = (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm")
    sequence = dict.fromkeys(norms, "-, tp, -")
    model = model_type(config).train()
    return Case(name, model, (tokens(),), {}, hf_next_token, (labels(),), specs, sequence, **FLOAT32_INSIDE)


@_case
def hf_llama() -> Case:
    """Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _decoder("hf_llama", LlamaConfig, LlamaForCausalLM)


@_case
def hf_qwen3() -> Case:
    """Qwen3: norms on the queries and keys of each head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _decoder("hf_qwen3", Qwen3Config, Qwen3ForCausalLM, head_dim=DIM // HEADS)


@_case
def hf_bert() -> Case:
    """BERT, masked language model; samples of different lengths, by attention_mask."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    lengths = LENGTH - torch.arange(BATCH)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    layer = "bert.encoder.layer.*."
    specs = {"bert.embeddings.word_embeddings.weight": "tp, -", "cls.predictions.bias": "tp"}
    for name in ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"):
        specs |= {f"{layer}{name}.weight": "tp, -", f"{layer}{name}.bias": "tp"}
    specs |= {f"{layer}attention.output.dense.weight": "-, tp", f"{layer}output.dense.weight": "-, tp"}
    sequence = {f"{layer}{name}.LayerNorm": "-, tp, -" for name in ("attention.output", "output")}
    kwargs = {"input_ids": tokens(), "attention_mask": mask}
    model = BertForMaskedLM(config).train()
    return Case("hf_bert", model, (), kwargs, hf_next_token, (labels(),), specs, sequence)


@_case
def hf_t5() -> Case:
    """T5: encoder and decoder, relative positions shared by the layers, one embedding for both and the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=DIM,
        d_kv=DIM // HEADS,
        d_ff=HIDDEN,
        num_layers=2,
        num_heads=HEADS,
        dropout_rate=0.0,
        use_cache=False,
    )
    specs = {"shared.weight": "tp, -", "**.DenseReluDense.wi.weight": "tp, -", "**.DenseReluDense.wo.weight": "-, tp"}
    for attention in ("SelfAttention", "EncDecAttention"):
        specs |= {f"**.{attention}.{p}.weight": "tp, -" for p in "qkv"}
        specs |= {f"**.{attention}.o.weight": "-, tp"}
    specs |= {"**.SelfAttention.relative_attention_bias.weight": "-, tp"}
    sequence = {"**.layer_norm": "-, tp, -", "**.final_layer_norm": "-, tp, -"}
    kwargs = {"input_ids": tokens(), "decoder_input_ids": tokens()}
    model = T5ForConditionalGeneration(config).train()
    return Case("hf_t5", model, (), kwargs, hf_next_token, (labels(),), specs, sequence, **FLOAT32_INSIDE)


@_case
def hf_vit() -> Case:
    """A vision transformer: 16 patches and the class token make 17, which no mesh divides."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=16,
    )
    layer = "vit.layers.*."
    specs = {}
    for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"):
        specs |= {f"{layer}{name}.weight": "tp, -", f"{layer}{name}.bias": "tp"}
    specs |= {f"{layer}attention.o_proj.weight": "-, tp", f"{layer}mlp.fc2.weight": "-, tp"}
    x, y = torch.randn(BATCH, 3, 16, 16), torch.randint(0, 16, (BATCH,))
    model = ViTForImageClassification(config).train()
    return Case("hf_vit", model, (x,), {}, hf_classify, (y,), specs)
