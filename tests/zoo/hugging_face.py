"""Hugging Face models, unedited, from configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from tests.models import DIM, HEADS, HIDDEN, KV_HEADS, LENGTH, VOCAB

from .cases import (
    BATCH,
    FLOAT32_INSIDE,
    Case,
    case,
    hf_classify,
    hf_next_token,
    labels,
    tokens,
)


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


@case
def hf_gpt2() -> Case:
    """GPT-2: the head is tied to the embedding."""
    return _gpt2("hf_gpt2", dropout=0.0)


@case
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


@case
def hf_llama() -> Case:
    """Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _decoder("hf_llama", LlamaConfig, LlamaForCausalLM)


@case
def hf_qwen3() -> Case:
    """Qwen3: norms on the queries and keys of each head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _decoder("hf_qwen3", Qwen3Config, Qwen3ForCausalLM, head_dim=DIM // HEADS)


@case
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


@case
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


@case
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
