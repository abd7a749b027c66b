"""Transformers of diffusers for videos: options that make them tiny, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.survey.samples import BATCH, Cases, noise

STEPS = torch.tensor([1, 5, 20, 70])
TEXT, WIDE = 8, 16
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4}
COG: dict[str, Any] = {
    **HEADS,
    "time_embed_dim": 8,
    "text_embed_dim": WIDE,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "max_text_seq_length": TEXT,
}
WAN: dict[str, Any] = {
    **HEADS,
    "attention_head_dim": 12,
    "text_dim": WIDE,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
PICTURED: dict[str, Any] = {"image_dim": WIDE, "added_kv_proj_dim": 48}
HUNYUAN: dict[str, Any] = {
    **HEADS,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": WIDE,
    "rope_axes_dim": (2, 2, 4),
}
COSMOS: dict[str, Any] = {
    **HEADS,
    "attention_head_dim": 12,
    "num_layers": 2,
    "mlp_ratio": 2,
    "text_embed_dim": WIDE,
    "adaln_lora_dim": 4,
    "max_size": (4, 16, 16),
    "concat_padding_mask": False,
}
LTX: dict[str, Any] = {**HEADS, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": WIDE}
WHOLE = {"num_frames": 2, "height": 4, "width": 4}


def _video(channels: int = 4, frames: int = 2) -> dict[str, Tensor]:
    return {"hidden_states": noise(channels, frames, 8, 8)}


def _frames() -> dict[str, Tensor]:
    return {"hidden_states": noise(2, 4, 8, 8)}


def _said() -> dict[str, Tensor]:
    return {"timestep": STEPS, "encoder_hidden_states": noise(TEXT, WIDE)}


def _mask(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"encoder_attention_mask": torch.ones(BATCH, TEXT, dtype=dtype)}


def _seen() -> dict[str, Tensor]:
    return {"encoder_hidden_states_image": noise(5, WIDE)}


VIDEOS: Cases = {
    "AllegroTransformer3DModel": (
        {**HEADS, "num_layers": 2, "cross_attention_dim": 32, "sample_height": 8, "sample_width": 8, "sample_frames": 2}
        | {"caption_channels": WIDE},
        lambda: {**_video(), **_said()},
    ),
    "LatteTransformer3DModel": (
        {**HEADS, "num_layers": 2, "patch_size": 2, "sample_size": 8, "cross_attention_dim": 32, "video_length": 2}
        | {"caption_channels": WIDE, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000}
        | {"norm_elementwise_affine": False, "activation_fn": "gelu-approximate"},
        lambda: {**_video(), **_said()},
    ),
    "CogVideoXTransformer3DModel": (COG, lambda: {**_frames(), **_said()}),
    "CogVideoXTransformer3DModel:rotary": (
        {**COG, "use_rotary_positional_embeddings": True},
        lambda: {**_frames(), **_said(), "image_rotary_emb": (torch.randn(32, 8), torch.randn(32, 8))},
    ),
    "ConsisIDTransformer3DModel": (COG, lambda: {**_frames(), **_said()}),
    "ConsisIDTransformer3DModel:faces": (
        {**COG, "is_train_face": True, "cross_attn_interval": 1, "cross_attn_dim_head": 8, "cross_attn_num_heads": 2}
        | {"LFE_id_dim": 2, "LFE_vit_dim": 2, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2}
        | {"LFE_num_id_token": 1, "LFE_num_querie": 1, "LFE_output_dim": 21, "LFE_ff_mult": 1, "LFE_num_scale": 1},
        lambda: {**_frames(), **_said(), "id_cond": noise(2), "id_vit_hidden": [noise(2, 2)]},
    ),
    "LTXVideoTransformer3DModel": (
        LTX,
        lambda: {"hidden_states": noise(32, 4), **_said(), **_mask(torch.bool), **WHOLE},
    ),
    "MochiTransformer3DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "text_embed_dim": WIDE}
        | {"pooled_projection_dim": 16, "time_embed_dim": 8, "max_sequence_length": TEXT},
        lambda: {**_video(), **_said(), **_mask(torch.bool)},
    ),
    "WanTransformer3DModel": (WAN, lambda: {**_video(), **_said()}),
    "WanTransformer3DModel:pictured": ({**WAN, **PICTURED}, lambda: {**_video(), **_said(), **_seen()}),
    "WanVACETransformer3DModel": (
        {**WAN, "vace_layers": [0, 1], "vace_in_channels": 6},
        lambda: {**_video(), **_said(), "control_hidden_states": noise(6, 2, 8, 8)},
    ),
    "SkyReelsV2Transformer3DModel": (WAN, lambda: {**_video(), **_said()}),
    "ChronoEditTransformer3DModel": ({**WAN, **PICTURED}, lambda: {**_video(), **_said(), **_seen()}),
    "AnyFlowTransformer3DModel": (
        WAN,
        lambda: {**_frames(), **_said(), **dict.fromkeys(("timestep", "r_timestep"), STEPS[:, None].expand(BATCH, 2))},
    ),
    "HunyuanVideoTransformer3DModel": (
        {**HUNYUAN, "pooled_projection_dim": WIDE},
        lambda: {**_video(), **_said(), **_mask(), "pooled_projections": noise(WIDE), "guidance": torch.rand(BATCH)},
    ),
    "HunyuanVideoFramepackTransformer3DModel": (
        {
            **HUNYUAN,
            "pooled_projection_dim": WIDE,
            "has_image_proj": True,
            "has_clean_x_embedder": True,
            "image_proj_dim": WIDE,
        },
        lambda: (
            {**_video(), **_said(), **_mask(), "pooled_projections": noise(WIDE), "guidance": torch.rand(BATCH)}
            | {"image_embeds": noise(3, WIDE), "indices_latents": torch.arange(2)}
            | {"latents_clean": noise(4, 1, 8, 8), "indices_latents_clean": torch.arange(1)}
            | {"latents_history_2x": noise(4, 2, 8, 8), "indices_latents_history_2x": torch.arange(2)}
            | {"latents_history_4x": noise(4, 4, 8, 8), "indices_latents_history_4x": torch.arange(4)}
        ),
    ),
    "HunyuanImageTransformer2DModel": (
        {**HUNYUAN, "rope_axes_dim": (4, 4)},
        lambda: {"hidden_states": noise(4, 4, 4), **_said(), **_mask(), "timestep": STEPS.float()},
    ),
    "HunyuanVideo15Transformer3DModel": (
        {**{k: v for k, v in HUNYUAN.items() if k != "num_single_layers"}, "text_embed_2_dim": WIDE}
        | {"image_embed_dim": WIDE, "target_size": 8},
        lambda: (
            {**_video(), **_said(), **_mask(), "image_embeds": noise(3, WIDE), "timestep": STEPS.float()}
            | {"encoder_hidden_states_2": noise(5, WIDE), "encoder_attention_mask_2": torch.ones(BATCH, 5)}
        ),
    ),
    "CosmosTransformer3DModel": (
        COSMOS,
        lambda: {**_video(), **_said(), "fps": 30},
    ),
    "EasyAnimateTransformer3DModel": (
        {**HEADS, "attention_head_dim": 16, "time_embed_dim": 8, "text_embed_dim": WIDE, "num_layers": 2}
        | {"mmdit_layers": 1, "patch_size": 2, "sample_width": 8, "sample_height": 8},
        lambda: {**_video(), **_said()},
    ),
    "SanaVideoTransformer3DModel": (
        {
            **HEADS,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 12,
        }
        | {"cross_attention_dim": 48, "caption_channels": WIDE, "sample_size": 8, "rope_max_seq_len": 32},
        lambda: {**_video(), **_said()},
    ),
    "Kandinsky5Transformer3DModel": (
        {"in_text_dim": WIDE, "in_text_dim2": WIDE, "time_dim": 32, "model_dim": 48, "ff_dim": 64}
        | {"num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 8, 8)},
        lambda: (
            {"hidden_states": noise(2, 8, 8, 4), **_said(), "pooled_projections": noise(WIDE)}
            | {
                "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
                "text_rope_pos": torch.arange(TEXT),
            }
        ),
    ),
    "MotifVideoTransformer3DModel": (
        {**HEADS, "num_layers": 1, "num_single_layers": 1, "text_embed_dim": WIDE, "rope_axes_dim": (2, 2, 4)},
        lambda: {**_video(), **_said()},
    ),
}
"""Models of latents of videos."""
