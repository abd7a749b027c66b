"""UNets, ControlNets and adapters of diffusers: options that make them tiny, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.survey.samples import BATCH, Cases, noise

STEPS = torch.tensor([1, 5, 20, 70])
TEXT = 6


def _image(channels: int = 4, *more: int) -> Tensor:
    return noise(channels, *more, 8, 8)


def _said(width: int = 16) -> dict[str, Tensor]:
    return {"timestep": STEPS, "encoder_hidden_states": noise(TEXT, width)}


def _each_frame() -> Tensor:
    return torch.randn(3 * BATCH, TEXT, 16)


SMALL: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
PLAIN: dict[str, Any] = {
    **SMALL,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
}
DOWN: dict[str, Any] = {
    **SMALL,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
CROSSED: dict[str, Any] = {**DOWN, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
WITH_TIMES: dict[str, Any] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
    "use_linear_projection": True,
}
SIMPLE: dict[str, Any] = {
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "resnet_time_scale_shift": "scale_shift",
}
VIDEO: dict[str, Any] = {
    **SMALL,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
MOTION: dict[str, Any] = {"cross_attention_dim": 16, "num_attention_heads": 2, "motion_num_attention_heads": 2}
SKIPPED: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
    "up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
    "time_embedding_type": "fourier",
    "norm_num_groups": None,
    "norm_eps": 1e-6,
    "mid_block_scale_factor": 2**0.5,
    "layers_per_block": 1,
    "attention_head_dim": 4,
}
ROWS: dict[str, Any] = {
    "block_out_channels": (8, 8, 16, 16),
    "in_channels": 14,
    "out_channels": 14,
    "time_embedding_type": "positional",
    "use_timestep_embedding": True,
    "out_block_type": "OutConv1DBlock",
    "flip_sin_to_cos": False,
    "freq_shift": 1.0,
    "mid_block_type": "MidResTemporalBlock1D",
    "down_block_types": ("DownResnetBlock1D",) * 4,
    "up_block_types": ("UpResnetBlock1D",) * 3,
    "act_fn": "swish",
}
CASCADE: dict[str, Any] = {
    "conditioning_dim": 16,
    "block_out_channels": (16, 16),
    "num_attention_heads": (2, 2),
    "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1),
    "clip_image_in_channels": 16,
    "clip_text_in_channels": 16,
    "clip_text_pooled_in_channels": 16,
    "timestep_ratio_embedding_dim": 16,
    "switch_level": (False,),
    "dropout": (0.0, 0.0),
}
TOKENS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "cond_embed_dim", "encoder_hidden_size", "in_channels", "block_out_channels"), 32),
    "micro_cond_encode_dim": 8,
    "micro_cond_embed_dim": 40,
    "vocab_size": 40,
    "codebook_size": 36,
    "num_res_blocks": 1,
    "block_num_heads": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "sample_size": 8,
}


def _cascade() -> dict[str, Any]:
    clip = {"clip_text_pooled": noise(1, 16), "clip_text": noise(TEXT, 16), "clip_img": noise(1, 16)}
    return {"sample": _image(16), "timestep_ratio": torch.rand(BATCH), **clip}


def _tokens() -> dict[str, Any]:
    given = {"encoder_hidden_states": noise(TEXT, 32), "pooled_text_emb": noise(32), "micro_conds": noise(5).abs()}
    return {"input_ids": torch.randint(0, 36, (BATCH, 8, 8)), **given}


def _xl() -> dict[str, Any]:
    return {"sample": _image(), **_said(), "added_cond_kwargs": {"text_embeds": noise(16), "time_ids": noise(6)}}


def _controlled(*frames: int) -> dict[str, Any]:
    return {"sample": _image(4, *frames), **_said(), "controlnet_cond": noise(3, *frames, 64, 64)}


def _union() -> dict[str, Any]:
    given = {"controlnet_cond": [noise(3, 64, 64)], "control_type": torch.ones(BATCH, 6), "control_type_idx": [1]}
    return {"sample": _image(), **_said(), **given}


UNETS: Cases = {
    "UNet2DModel": (PLAIN, lambda: {"sample": _image(3), "timestep": STEPS}),
    "UNet2DModel:skip": (SKIPPED, lambda: {"sample": _image(3), "timestep": STEPS}),
    "UNet2DModel:classes": (
        {**PLAIN, "num_class_embeds": 8, "resnet_time_scale_shift": "scale_shift", "downsample_type": "resnet"},
        lambda: {"sample": _image(3), "timestep": STEPS, "class_labels": torch.arange(BATCH)},
    ),
    "UNet2DConditionModel": (CROSSED, lambda: {"sample": _image(), **_said()}),
    "UNet2DConditionModel:xl": ({**CROSSED, **WITH_TIMES, "transformer_layers_per_block": (1, 2)}, _xl),
    "UNet2DConditionModel:simple": ({**CROSSED, **SIMPLE}, lambda: {"sample": _image(), **_said()}),
    "UNet2DConditionModel:mask": (
        CROSSED,
        lambda: {"sample": _image(), **_said(), "encoder_attention_mask": torch.ones(BATCH, TEXT).tril(3)},
    ),
    "UNet1DModel": ({"extra_in_channels": 64}, lambda: {"sample": noise(2, 64), "timestep": STEPS}),
    "UNet1DModel:rows": (ROWS, lambda: {"sample": noise(14, 16), "timestep": STEPS}),
    "UNet3DConditionModel": (VIDEO, lambda: {"sample": _image(4, 3), **_said()}),
    "I2VGenXLUNet": (
        VIDEO,
        lambda: {
            "sample": _image(4, 3),
            **_said(),
            "fps": torch.full((BATCH,), 24),
            "image_latents": _image(4, 3),
            "image_embeddings": noise(16),
        },
    ),
    "UNetMotionModel": (
        {
            **SMALL,
            **MOTION,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        },
        lambda: {"sample": _image(4, 3), "timestep": STEPS, "encoder_hidden_states": _each_frame()},
    ),
    "UNetSpatioTemporalConditionModel": (
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "cross_attention_dim": 16,
            "num_attention_heads": 4,
            "layers_per_block": 1,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
        },
        lambda: {"sample": noise(2, 8, 8, 8), **_said(), "added_time_ids": noise(3)},
    ),
    "Kandinsky3UNet": (
        {
            "time_embedding_dim": 8,
            "groups": 2,
            "attention_head_dim": 4,
            "layers_per_block": 3,
            "block_out_channels": (32, 64),
            "cross_attention_dim": 8,
            "encoder_hid_dim": 16,
        },
        lambda: {"sample": _image(), **_said(), "encoder_attention_mask": torch.ones(BATCH, TEXT)},
    ),
    "StableCascadeUNet": (CASCADE, _cascade),
    "UVit2DModel": (TOKENS, _tokens),
    "DreamLiteUNetModel": (CROSSED, lambda: {"sample": _image(), **_said()}),
    "ControlNetModel": ({**DOWN, "conditioning_embedding_out_channels": (4, 4, 8, 8)}, _controlled),
    "ControlNetUnionModel": (
        {**DOWN, "conditioning_embedding_out_channels": (4, 4, 8, 8), "num_trans_channel": 8, "num_trans_head": 2}
        | {"num_proj_channel": 8, "addition_time_embed_dim": 4},
        _union,
    ),
    "SparseControlNetModel": (
        {
            **SMALL,
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "conditioning_embedding_out_channels": (4, 8),
        },
        lambda: {
            "sample": _image(4, 3),
            "timestep": STEPS,
            "encoder_hidden_states": _each_frame(),
            "controlnet_cond": _image(4, 3),
            "conditioning_mask": noise(1, 3, 8, 8),
        },
    ),
    "UNetControlNetXSModel": (
        {
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "num_attention_heads": 2,
            "upcast_attention": False,
            "ctrl_block_out_channels": (4, 8),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 2,
            "ctrl_conditioning_embedding_out_channels": (4, 4, 8, 8),
        },
        _controlled,
    ),
    "T2IAdapter": ({"channels": [8, 16], "num_res_blocks": 1}, lambda: {"x": noise(3, 64, 64)}),
    "T2IAdapter:xl": (
        {"channels": [8, 16], "num_res_blocks": 1, "adapter_type": "full_adapter_xl"},
        lambda: {"x": noise(3, 64, 64)},
    ),
    "T2IAdapter:light": (
        {"channels": [8, 16], "num_res_blocks": 1, "adapter_type": "light_adapter"},
        lambda: {"x": noise(3, 64, 64)},
    ),
}
"""Models of images and of rows in several resolutions, and what is added to them."""
