"""Transformers of diffusers, for images and sound: options that make them tiny, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.survey.samples import BATCH, Cases, noise

STEPS = torch.tensor([1, 5, 20, 70])
TEXT, WIDE = 6, 16
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8}
LATENT: dict[str, Any] = {**HEADS, "in_channels": 4, "num_layers": 2, "sample_size": 8}
JOINT: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": WIDE,
}
SD3: dict[str, Any] = {
    **LATENT,
    "joint_attention_dim": WIDE,
    "caption_projection_dim": 32,
    "pooled_projection_dim": WIDE,
    "out_channels": 4,
    "pos_embed_max_size": 8,
}
SANA: dict[str, Any] = {
    **LATENT,
    "out_channels": 4,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 32,
    "caption_channels": WIDE,
}
HUNYUAN: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 32,
    "cross_attention_dim": WIDE,
    "cross_attention_dim_t5": WIDE,
    "pooled_projection_dim": 8,
    "text_len": TEXT,
    "text_len_t5": TEXT,
}
SOUND: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_attention_heads": 2,
    "cross_attention_dim": WIDE,
    "cross_attention_input_dim": WIDE,
    "time_proj_dim": 8,
    "global_states_input_dim": WIDE,
}
HIDREAM: dict[str, Any] = {
    **HEADS,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "patch_size": 2,
    "caption_channels": [32, WIDE],
    "text_emb_dim": WIDE,
    "axes_dims_rope": (4, 2, 2),
    "max_resolution": (8, 8),
    "llama_layers": (0, 1),
    "force_inference_output": True,
}


def _image(channels: int = 4) -> dict[str, Tensor]:
    return {"hidden_states": noise(channels, 8, 8)}


def _said(width: int = WIDE) -> dict[str, Tensor]:
    return {"timestep": STEPS, "encoder_hidden_states": noise(TEXT, width)}


def _tokens(channels: int = 4, axes: int = 3, times: int = 1) -> dict[str, Any]:
    ids = {"img_ids": torch.arange(16 * axes).view(16, axes) / 8, "txt_ids": torch.zeros(TEXT, axes)}
    said = {"encoder_hidden_states": noise(TEXT, WIDE), "timestep": torch.rand(BATCH) * times}
    return {"hidden_states": noise(16, channels), **said, **ids}


def _sd3() -> dict[str, Any]:
    return {**_image(), **_said(), "pooled_projections": noise(WIDE)}


def _hunyuan() -> dict[str, Any]:
    masks = dict.fromkeys(("text_embedding_mask", "text_embedding_mask_t5"), torch.ones(BATCH, TEXT))
    meta = {"image_meta_size": noise(6).abs(), "style": torch.zeros(BATCH, dtype=torch.int64)}
    rope = {"image_rotary_emb": [torch.randn(16, 8), torch.randn(16, 8)]}
    said = {**_said(), "timestep": STEPS.float()}
    return {**_image(), **said, "encoder_hidden_states_t5": noise(TEXT, WIDE), **masks, **meta, **rope}


def _lumina() -> dict[str, Any]:
    rotary = torch.polar(torch.ones(16, 16, 4), torch.randn(16, 16, 4))
    return {**_image(), **_said(), "encoder_mask": torch.ones(BATCH, TEXT), "image_rotary_emb": rotary} | {
        "cross_attention_kwargs": {}
    }


def _sound() -> dict[str, Any]:
    rotary = {"rotary_embedding": (torch.randn(9, 4), torch.randn(9, 4))}
    return {"hidden_states": noise(4, 8), **_said(), "global_hidden_states": noise(1, WIDE), **rotary}


def _sizes() -> dict[str, Tensor]:
    return dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.full((BATCH, 2), 8.0))


def _qwen() -> dict[str, Any]:
    said = {"encoder_hidden_states": noise(TEXT, WIDE), "encoder_hidden_states_mask": torch.ones(BATCH, TEXT)}
    return {"hidden_states": noise(16, 16), **said, "timestep": torch.rand(BATCH), "img_shapes": [[(1, 4, 4)]] * BATCH}


def _hidream() -> dict[str, Any]:
    said = {
        "encoder_hidden_states_t5": noise(TEXT, 32),
        "encoder_hidden_states_llama3": torch.randn(2, BATCH, TEXT, WIDE),
    }
    return {**_image(), "timesteps": STEPS, **said, "pooled_embeds": noise(WIDE)}


TRANSFORMERS: Cases = {
    "DiTTransformer2DModel": (
        {**LATENT, "norm_num_groups": 4},
        lambda: {**_image(), "timestep": STEPS, "class_labels": torch.arange(BATCH)},
    ),
    "PixArtTransformer2DModel": (
        {**LATENT, "cross_attention_dim": 32, "caption_channels": WIDE, "use_additional_conditions": False},
        lambda: {**_image(), **_said(), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "PixArtTransformer2DModel:conditions": (
        {**LATENT, "cross_attention_dim": 48, "caption_channels": WIDE, "num_attention_heads": 6}
        | {"use_additional_conditions": True},
        lambda: {**_image(), **_said(), "added_cond_kwargs": {"resolution": noise(2), "aspect_ratio": noise(1)}},
    ),
    "SD3Transformer2DModel": (SD3, _sd3),
    "SD3Transformer2DModel:dual": ({**SD3, "dual_attention_layers": (0,), "qk_norm": "rms_norm"}, _sd3),
    "SD3ControlNetModel": (SD3, lambda: {**_sd3(), "controlnet_cond": noise(4, 8, 8)}),
    "AuraFlowTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "joint_attention_dim": WIDE,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        lambda: {**_image(), **_said()},
    ),
    "FluxTransformer2DModel": (
        {**JOINT, "pooled_projection_dim": WIDE, "axes_dims_rope": (2, 2, 4)},
        lambda: {**_tokens(), "pooled_projections": noise(WIDE)},
    ),
    "FluxTransformer2DModel:guided": (
        {**JOINT, "pooled_projection_dim": WIDE, "axes_dims_rope": (2, 2, 4), "guidance_embeds": True},
        lambda: {**_tokens(), "pooled_projections": noise(WIDE), "guidance": torch.rand(BATCH)},
    ),
    "FluxControlNetModel": (
        {**JOINT, "pooled_projection_dim": WIDE, "axes_dims_rope": [2, 2, 4]},
        lambda: {**_tokens(), "pooled_projections": noise(WIDE), "controlnet_cond": noise(16, 4)},
    ),
    "Flux2Transformer2DModel": (
        {**JOINT, "timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2)},
        lambda: {**_tokens(axes=4), "guidance": torch.rand(BATCH)},
    ),
    "ChromaTransformer2DModel": (
        {**JOINT, "axes_dims_rope": (2, 2, 4), "approximator_num_channels": 8, "approximator_hidden_dim": 16}
        | {"approximator_layers": 1},
        _tokens,
    ),
    "BriaTransformer2DModel": ({**JOINT, "axes_dims_rope": [2, 2, 4]}, _tokens),
    "BriaFiboTransformer2DModel": (
        {**JOINT, "axes_dims_rope": [2, 2, 4], "text_encoder_dim": 16},
        lambda: {**_tokens(), "text_encoder_layers": [noise(TEXT, 16), noise(TEXT, 16)]},
    ),
    "LongCatImageTransformer2DModel": ({**JOINT, "axes_dims_rope": [2, 2, 4]}, _tokens),
    "OvisImageTransformer2DModel": ({**JOINT, "out_channels": 4, "axes_dims_rope": (2, 2, 4)}, _tokens),
    "SanaTransformer2DModel": (SANA, lambda: {**_image(), **_said()}),
    "SanaTransformer2DModel:guided": (
        {**SANA, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads"},
        lambda: {**_image(), **_said(), "guidance": torch.rand(BATCH)},
    ),
    "SanaControlNetModel": (SANA, lambda: {**_image(), **_said(), "controlnet_cond": noise(4, 8, 8)}),
    "HunyuanDiT2DModel": ({**HUNYUAN, "num_layers": 2}, _hunyuan),
    "HunyuanDiT2DControlNetModel": (
        {**HUNYUAN, "transformer_num_layers": 4},
        lambda: {**_hunyuan(), "controlnet_cond": noise(4, 8, 8)},
    ),
    "LuminaNextDiT2DModel": (
        {"sample_size": 8, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2}
        | {"multiple_of": 16, "cross_attention_dim": WIDE},
        _lumina,
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1}
        | {"num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "axes_dim_rope": (4, 2, 2)}
        | {"axes_lens": (32, 32, 32), "cap_feat_dim": WIDE},
        lambda: {**_image(), **_said(), "encoder_attention_mask": torch.ones(BATCH, TEXT, dtype=torch.bool)},
    ),
    "CogView3PlusTransformer2DModel": (
        {**LATENT, "out_channels": 4, "text_embed_dim": WIDE, "time_embed_dim": 8, "condition_dim": 2}
        | {"pos_embed_max_size": 8},
        lambda: {**_image(), **_said(), **_sizes()},
    ),
    "CogView4Transformer2DModel": (
        {**LATENT, "out_channels": 4, "text_embed_dim": WIDE, "time_embed_dim": 8, "condition_dim": 2}
        | {"pos_embed_max_size": 8, "rope_axes_dim": (8, 8)},
        lambda: {**_image(), **_said(), **_sizes()},
    ),
    "QwenImageTransformer2DModel": (
        {**HEADS, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": WIDE}
        | {"axes_dims_rope": (2, 2, 4)},
        _qwen,
    ),
    "QwenImageControlNetModel": (
        {**HEADS, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": WIDE}
        | {"axes_dims_rope": (2, 2, 4)},
        lambda: {**_qwen(), "controlnet_cond": noise(16, 16)},
    ),
    "HiDreamImageTransformer2DModel": (HIDREAM, _hidream),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "context_in_dim": WIDE, "hidden_size": 32, "num_heads": 4, "depth": 2, "axes_dim": [4, 4]},
        lambda: {**_image(), **_said(), "timestep": torch.rand(BATCH)},
    ),
    "ErnieImageTransformer2DModel": (
        {"hidden_size": 32, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 64, "in_channels": 4}
        | {"out_channels": 4, "text_in_dim": WIDE, "rope_axes_dim": (2, 2, 4)},
        lambda: {**_image(), "timestep": STEPS, "text_bth": noise(TEXT, WIDE), "text_lens": torch.full((BATCH,), TEXT)},
    ),
    "PriorTransformer": (
        {**HEADS, "num_layers": 2, "embedding_dim": 16, "num_embeddings": TEXT, "additional_embeddings": 4},
        lambda: {"hidden_states": noise(16), **_said(), "proj_embedding": noise(16)},
    ),
    "Transformer2DModel": (
        {**HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": WIDE},
        lambda: {**_image(32), "encoder_hidden_states": noise(TEXT, WIDE)},
    ),
    "Transformer2DModel:vectors": (
        {**HEADS, "num_vector_embeds": 12, "sample_size": 4, "cross_attention_dim": WIDE},
        lambda: {"hidden_states": torch.randint(12, (BATCH, 16)), "encoder_hidden_states": noise(TEXT, WIDE)},
    ),
    "DreamLiteTransformer2DModel": (
        {**HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": WIDE},
        lambda: {**_image(32), "encoder_hidden_states": noise(TEXT, WIDE)},
    ),
    "TransformerTemporalModel": (
        {**HEADS, "in_channels": 32, "norm_num_groups": 8},
        lambda: {**_image(32), "num_frames": 2},
    ),
    "StableAudioDiTModel": (SOUND, _sound),
    "StableAudio3DiTModel": (
        {"io_channels": 4, "embed_dim": 64, "depth": 2, "num_heads": 4, "cond_token_dim": WIDE, "global_cond_dim": WIDE}
        | {"local_add_cond_dim": 8, "timestep_features_dim": 16, "num_memory_tokens": 4},
        lambda: {"hidden_states": noise(4, 8), **_said(), "global_hidden_states": noise(WIDE)},
    ),
    "AceStepTransformer1DModel": (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
        | {"num_key_value_heads": 2, "in_channels": 24, "audio_acoustic_hidden_dim": 8, "sliding_window": 4},
        lambda: (
            {"hidden_states": noise(8, 8), "timestep": torch.rand(BATCH), "timestep_r": torch.rand(BATCH)}
            | {"encoder_hidden_states": noise(TEXT, 32), "context_latents": noise(8, 16)}
        ),
    ),
    "MiniMaxMusic3Transformer1DModel": (
        {**HEADS, "in_channels": 4, "condition_dim": WIDE, "num_layers": 2, "ff_inner_dim": 64, "rotary_dim": 4}
        | {"fourier_embedding_dim": 16},
        lambda: {"hidden_states": noise(4, 8), "timestep": torch.rand(BATCH), "encoder_hidden_states": noise(8, WIDE)},
    ),
    "LongCatAudioDiTTransformer": (
        {"dit_dim": 32, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": WIDE, "latent_dim": 4},
        lambda: (
            {"hidden_states": noise(8, 4), **_said(), "encoder_attention_mask": torch.ones(BATCH, TEXT).bool()}
            | {"latent_cond": noise(8, 4)}
        ),
    ),
}
"""Models of latents in one resolution, seen as tokens."""
