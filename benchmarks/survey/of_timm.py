"""Architectures of timm, one or more of each of its files: the smallest that it has, on small images.

Sizes are those of timm, but for what ``OWN`` says. Where torchvision is not installed, a stand-in has the few names of
it that timm imports (``torchvision_stand_in.py``).
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.survey import torchvision_stand_in
from benchmarks.survey.samples import Sample, in_float64, noise, without_chance

torchvision_stand_in.install()

import timm  # noqa: E402 - behind the stand-in

IMAGE, CLASSES = 64, 8
NAMES = """beit_base_patch16_224 halonet_h1 lambda_resnet26t eca_botnext26ts_256 test_byobnet mobileone_s0
cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 test_convnext cpubone_nano crossvit_tiny_240 csatv2
cs3darknet_focus_s cspnext_tiny davit_tiny deepseek_vit_412m deit_tiny_distilled_patch16_224 densenet121
dla46x_c dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 test_efficientnet efficientvim_m1
efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 focalnet_tiny_srf
gcvit_xxtiny gemma4_vit_167m ghostnet_050 ghostnetv3_050 hardcorenas_a hgnetv2_b0 hiera_tiny_224
sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 inception_v4
lcnetv2_small levit_128s lowformer_b0 maxvit_pico_rw_256 coatnet_pico_rw_224 test_mambaout poolformer_s12
convformer_s18 mixer_s32_224 gmlp_ti16_224 resmlp_12_224 mobilenetv3_small_050 lcnet_035
mobilenetv4_conv_small_035 mobilenetv5_base mobilevit_xxs mobilevitv2_050 mvitv2_tiny
naflexvit_base_patch16_gap nasnetalarge nest_tiny nextvit_small test_nfnet pit_ti_224 pnasnet5large
pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnetx_002 regnety_002 repghostnet_050 repvit_m0_9 res2net50_48w_2s
resnest14d test_resnet ecaresnet26t resnetv2_18 resnetv2_50d_gn rexnet_100 selecsls42 legacy_seresnet18
sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224
swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_pcpvt_small
twins_svt_small vgg11 visformer_tiny vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 test_vit_relpos
samvit_base_patch16 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim legacy_xception xception41
xcit_nano_12_p16_224""".split()

SHALLOW: dict[str, Any] = {"depth": 2}
NARROW: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("beit_base_patch16_224", "deepseek_vit_412m", "gemma4_vit_167m", "samvit_base_patch16"), NARROW),
    **dict.fromkeys(("naflexvit_base_patch16_gap", "qwen3_vit_88m"), NARROW),
    **dict.fromkeys(("deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "vit_tiny_patch16_224"), SHALLOW),
    **dict.fromkeys(("cait_xxs24_224", "vit_tiny_r_s16_p8_224", "tnt_s_patch16_224"), SHALLOW),
    "xcit_nano_12_p16_224": SHALLOW,
    "crossvit_tiny_240": {"depth": [[1, 1, 0]] * 2},
    "nasnetalarge": {"num_features": 768, "stem_size": 24},
}
"""What single architectures are told beside."""
SIZE: dict[str, int] = {
    "halonet_h1": 256,
    **dict.fromkeys(("inception_resnet_v2", "inception_v3", "inception_v4"), 128),
    "crossvit_tiny_240": 240,
    "deepseek_vit_412m": 56,
    "efficientformer_l1": 224,
}
"""Images that are not ``IMAGE`` high and wide."""


def sample(name: str) -> Sample:
    """A model of an architecture, random, in float64, and images for it."""
    size = SIZE.get(name, IMAGE)
    options = {"img_size": size} if timm.get_pretrained_cfg(name, allow_unregistered=True).fixed_input_size else {}
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES, **options, **OWN.get(name, {}))
    return in_float64(without_chance(model), {"x": noise(3, size, size)})
