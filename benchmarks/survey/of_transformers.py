"""Architectures of transformers as data, each made tiny and random, with inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.survey.samples import BATCH, Sample, in_float64

FLOAT32 = ("xglm", "fsmt", "mra")
"""Architectures that do not take float64: some constant of theirs is float32."""
LENGTH, VOCABULARY, IMAGE = 16, 96, 32

TEXT = """albert bert bert-generation big_bird biogpt bitnet bloom camembert codegen cohere cohere2 convbert cpmant
ctrl data2vec-text deberta deberta-v2 decision_transformer deepseek_v2 deepseek_v3 diffllama distilbert doge electra
ernie ernie4_5 ernie4_5_moe eurobert exaone4 falcon falcon_h1 falcon_mamba flaubert flex_olmo fnet funnel gemma gemma2
gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe
granitemoeshared helium hunyuan_v1_dense ibert internlm3 jamba jetmoe layoutlm lfm2 lilt llama longformer luke mamba
mamba2 markuplm megatron-bert minicpm3 minimax ministral3 mistral mixtral modernbert modernbert-decoder mpnet mpt mra
nemotron nystromformer olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
qwen3_next recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss smollm3 splinter
squeezebert stablelm starcoder2 tapas vaultgemma visual_bert xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso"""
PAIRS = """bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5"""
VISION = """beit bit convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers dinov3_convnext
dinov3_vit dpt efficientnet focalnet hgnet_v2 hiera ijepa levit mlcd_vision_model mobilenet_v1 mobilenet_v2 mobilevit
mobilevitv2 poolformer pvt pvt_v2 regnet resnet segformer swiftformer swin swinv2 textnet vit vit_mae vit_msn yolos
clip_vision_model siglip_vision_model"""
AUDIO = """audio-spectrogram-transformer data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wavlm whisper
speech_to_text moonshine"""
BOTH = "altclip blip chinese_clip clip clipseg git groupvit llava paligemma siglip vilt"
FAMILIES = {"text": TEXT, "pairs": PAIRS, "vision": VISION, "audio": AUDIO, "both": BOTH}
NAMES = {name: family for family, names in FAMILIES.items() for name in names.split()}
"""Every architecture, and which inputs it takes."""

TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "projection_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "d_embed", "attention_hidden_size", "d_embedding"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner"), 64),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size", "dim_feedforward", "n_inner"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "num_labels"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "patch_size"), 8),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("image_token_id", "image_token_index"), 7),
    "image_size": IMAGE,
    "num_mel_bins": 16,
    "use_cache": False,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 3,
    "cls_token_id": 4,
    "mask_token_id": 5,
}
"""Fields of configurations that are made small, wherever a configuration (or a part of one) has them."""

CONV = {"conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_conv_pos_embeddings": 16}
OWN: dict[str, dict[str, Any]] = {
    **{key: {"num_key_value_heads": 4} for key in ("deepseek_v3", "minicpm3", "nemotron")},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    **{key: {"rotary_dim": 4} for key in ("codegen", "gptj")},
    "hunyuan_v1_dense": {"head_dim": 8},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "cvt": {"drop_path_rate": [0.0, 0.0, 0.0]},
    "dinov3_vit": {"pos_embed_rescale": None, "pos_embed_shift": None, "pos_embed_jitter": None},
    **{key: {"image_size": 64, "patch_size": 4} for key in ("convnext", "convnextv2")},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8]},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "levit": {"image_size": 64, "patch_size": 16},
    **{key: {"image_size": [64, 64]} for key in ("textnet", "yolos")},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    **{key: {"embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6], "window_size": 2} for key in ("swin", "swinv2")},
    **dict.fromkeys(("hubert", "sew", "unispeech", "unispeech-sat", "wav2vec2", "wavlm", "data2vec-audio"), CONV),
}
"""What single architectures need beside."""
HEADS = {
    "text": ("CAUSAL_LM", "MASKED_LM"),
    "pairs": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "vision": ("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "DEPTH_ESTIMATION"),
    "audio": ("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION"),
    "both": ("IMAGE_TEXT_TO_TEXT",),
}
"""Which head an architecture gets: the first that it has, else none."""


def small(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields by which a configuration becomes a tiny one, those of its parts too."""
    made: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            made[name] = small(value)
        elif isinstance(value, float) and "drop" in name:
            made[name] = 0.0
        elif name in ("depths", "stage_num_blocks"):
            made[name] = [1] * len(value)
        elif name in TINY and isinstance(value, type(TINY[name]) if isinstance(TINY[name], bool) else (int, float)):
            made[name] = TINY[name]
    return made


def class_of(name: str) -> type:
    """The model class of an architecture."""
    for task in HEADS[NAMES[name]]:
        found = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(name)
        if found:
            break
    else:
        found = modeling_auto.MODEL_MAPPING_NAMES[name]
    made: type = getattr(transformers, found if isinstance(found, str) else found[0])
    return made


def sample(name: str) -> Sample:
    """A tiny model of an architecture, random, in float64, and inputs for it."""
    config_class = CONFIG_MAPPING[name]
    config = config_class(**{**small(config_class()), **OWN.get(name, {})})
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = class_of(name)(config).train()
    kwargs = INPUTS[NAMES[name]](config)
    return Sample(model, kwargs) if name in FLOAT32 else in_float64(model, kwargs)


# ---- inputs


def _tokens() -> Tensor:
    return torch.randint(8, VOCABULARY, (BATCH, LENGTH))


def _text(config: Any) -> dict[str, Any]:
    if config.model_type == "decision_transformer":
        rows = {"states": config.state_dim, "actions": config.act_dim, "rewards": 1, "returns_to_go": 1}
        floats = {name: torch.randn(BATCH, LENGTH, size) for name, size in rows.items()}
        return {**floats, "timesteps": torch.arange(LENGTH).repeat(BATCH, 1)}
    return {"input_ids": _tokens()}


def _pairs(config: Any) -> dict[str, Any]:
    given = {"input_ids": _tokens(), "decoder_input_ids": _tokens()}
    if config.model_type == "switch_transformers":  # makes a mask of ones when it is run, and none when it is captured
        given["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    return given


def _part(config: Any, name: str, default: Any) -> Any:
    """A field of a configuration, or of the part of it for images."""
    inside = getattr(config, "vision_config", None)
    return getattr(config, name, None) or getattr(inside, name, None) or default


def _pixels(config: Any) -> Tensor:
    size = _part(config, "image_size", IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(BATCH, _part(config, "num_channels", 3), height, width)


def _vision(config: Any) -> dict[str, Any]:
    return {"pixel_values": _pixels(config)}


def _audio(config: Any) -> dict[str, Any]:
    if config.model_type == "audio-spectrogram-transformer":
        return {"input_values": torch.randn(BATCH, config.max_length, config.num_mel_bins)}
    if config.model_type == "whisper":
        frames = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": frames, "decoder_input_ids": _tokens()}
    if config.model_type == "speech_to_text":
        frames = torch.randn(BATCH, 32, config.input_feat_per_channel)
        return {"input_features": frames, "decoder_input_ids": _tokens()}
    wave = {"input_values": torch.randn(BATCH, 3200)}
    return {**wave, "decoder_input_ids": _tokens()} if config.is_encoder_decoder else wave


def _both(config: Any) -> dict[str, Any]:
    tokens = _tokens()
    image_token = getattr(config, "image_token_id", None)
    if isinstance(image_token, int):
        patches = (IMAGE // _part(config, "patch_size", 8)) ** 2
        tokens = torch.cat([torch.full((BATCH, patches), image_token), tokens], 1)
    return {"input_ids": tokens, "pixel_values": _pixels(config)}


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "text": _text,
    "pairs": _pairs,
    "vision": _vision,
    "audio": _audio,
    "both": _both,
}
