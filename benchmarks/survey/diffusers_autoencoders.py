"""Autoencoders of diffusers: options that make them tiny, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.survey.samples import Cases, noise


def _given(*shape: int, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": noise(*shape), **more}


def _blocks(kind: str, count: int = 2) -> dict[str, Any]:
    return {"down_block_types": (kind.format("Down"),) * count, "up_block_types": (kind.format("Up"),) * count}


TWO: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1}
NORMED: dict[str, Any] = {**TWO, "norm_num_groups": 4}
FLAT: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    **NORMED,
}
STAGES: dict[str, Any] = {"dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True], "z_dim": 4}
SHIFTED: dict[str, Any] = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
FOUR: dict[str, Any] = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 2, "layers_per_block": 1}
PATCHES: dict[str, Any] = {
    "latent_channels": 4,
    "attention_head_dim": 2,
    **dict.fromkeys(("encoder_block_types", "decoder_block_types"), ("ResBlock", "EfficientViTBlock")),
    **dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (8, 8)),
    **dict.fromkeys(("encoder_layers_per_block", "decoder_layers_per_block"), (1, 1)),
    **dict.fromkeys(("encoder_qkv_multiscales", "decoder_qkv_multiscales"), ((), (5,))),
    "decoder_norm_types": ("rms_norm", "rms_norm"),
    "decoder_act_fns": ("silu", "silu"),
}
LTX: dict[str, Any] = {
    "latent_channels": 8,
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 8, 8, 8),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, False, False),
    "decoder_spatio_temporal_scaling": (True, True, False, False),
    "patch_size": 1,
}
LTX2: dict[str, Any] = {
    "latent_channels": 8,
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (16, 32, 64),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "patch_size": 1,
}
MOCHI: dict[str, Any] = {
    "latent_channels": 4,
    **dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (32, 32, 32, 32)),
    "layers_per_block": (1, 1, 1, 1, 1),
    **SHIFTED,
}

AUTOENCODERS: Cases = {
    "AutoencoderKL": (FLAT, _given(3, 16, 16)),
    "AutoencoderKLFlux2": ({**FLAT, "latent_channels": 4}, _given(3, 16, 16)),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1},
        _given(3, 16, 16, num_frames=2),
    ),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (8, 16),
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (8, 16),
            "norm_num_groups": 4,
        },
        lambda: {"sample": noise(3, 16, 16), "mask": noise(1, 16, 16).gt(0).double()},
    ),
    "VQModel": ({**FLAT, "num_vq_embeddings": 16}, _given(3, 16, 16)),
    "VQModel:spatial": (
        {**FLAT, "block_out_channels": (32, 32), "num_vq_embeddings": 16, "norm_type": "spatial"},
        _given(3, 16, 16),
    ),
    "AutoencoderTiny": (
        {
            **dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (8, 8)),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        _given(3, 16, 16),
    ),
    "AutoencoderDC": (PATCHES, _given(3, 16, 16)),
    "AutoencoderDC:interpolate": (
        {**PATCHES, "upsample_block_type": "interpolate", "downsample_block_type": "Conv"},
        _given(3, 16, 16),
    ),
    "ConsistencyDecoderVAE": (
        {
            "encoder_block_out_channels": (8, 8, 8, 8),
            "encoder_norm_num_groups": 4,
            "decoder_block_out_channels": (8, 8, 8, 8),
            "decoder_layers_per_block": 1,
            "decoder_norm_num_groups": 4,
        },
        _given(3, 16, 16),
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 12,
            "decoder_channels": 12,
            "decoder_input_channels": 6,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
        },
        _given(2, 64),
    ),
    "AutoencoderKLCogVideoX": (
        {**_blocks("CogVideoX{}Block3D", 4), **FOUR, "latent_channels": 4},
        _given(3, 5, 16, 16),
    ),
    "AutoencoderKLCosmos": (
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 8, 8, 8),
            "decode_block_out_channels": (8, 8, 8, 8),
            "attention_resolutions": (8,),
            "resolution": 64,
            "num_layers": 1,
            "latents_mean": [0.0] * 64,
            "latents_std": [1.0] * 64,
        },
        _given(3, 9, 32, 32),
    ),
    "AutoencoderKLHunyuanVideo": (
        {**_blocks("HunyuanVideo{}Block3D", 4), **FOUR, "latent_channels": 4},
        _given(3, 5, 16, 16),
    ),
    "AutoencoderKLHunyuanImage": (
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "sample_size": 32,
        },
        _given(3, 16, 16),
    ),
    "AutoencoderKLHunyuanImageRefiner": (
        {
            "latent_channels": 4,
            "block_out_channels": (16, 16, 32),
            "layers_per_block": 1,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
        },
        _given(3, 5, 16, 16),
    ),
    "AutoencoderKLLTXVideo": (LTX, _given(3, 9, 16, 16)),
    "AutoencoderKLLTX2Video": (LTX2, _given(3, 9, 32, 32)),
    "AutoencoderKLLTX2Audio": (
        {"base_channels": 16, "ch_mult": (1, 2), "num_res_blocks": 1, "resolution": 32, "latent_channels": 4},
        _given(2, 16, 16),
    ),
    "AutoencoderKLMagvit": ({**FOUR, "latent_channels": 4}, _given(3, 9, 16, 16)),
    "AutoencoderKLMochi": (MOCHI, _given(3, 7, 16, 16)),
    "AutoencoderKLQwenImage": ({**STAGES, **SHIFTED, "base_dim": 4}, _given(3, 5, 16, 16)),
    "AutoencoderKLWan": ({**STAGES, **SHIFTED, "base_dim": 4}, _given(3, 5, 16, 16)),
    "AutoencoderKLWan:residual": (
        {
            **STAGES,
            **SHIFTED,
            "base_dim": 4,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
        }
        | {"dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]},
        _given(3, 5, 16, 16),
    ),
    "AutoencoderKLKVAE": (
        {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 2)},
        _given(3, 16, 16),
    ),
    "AutoencoderKLKVAEVideo": (
        {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2},
        _given(3, 5, 16, 16),
    ),
    "AutoencoderVidTok": (
        {"ch": 32, "ch_mult": [1, 2, 2, 2], "num_res_blocks": 1},
        _given(3, 5, 16, 16, sample_posterior=False),
    ),
    "MMAudioVocoder": (
        {"num_mels": 8, "upsample_initial_channel": 16, "upsample_rates": (2, 2), "upsample_kernel_sizes": (4, 4)},
        lambda: {"mel": noise(8, 12)},
    ),
    "AutoencoderRAE": (
        {
            "encoder_hidden_size": 64,
            "encoder_num_hidden_layers": 2,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
            "patch_size": 4,
            "encoder_input_size": 28,
            "image_size": 8,
        },
        _given(3, 28, 28),
    ),
}
"""Models that make latents of images, videos and sound, and these again."""
