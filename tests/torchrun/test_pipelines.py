"""Pipelines on real processes (gloo): what one device computes, and what torch's own tools ask of a module."""

from __future__ import annotations

from tests.torchrun.launch import on_ranks


def test_pipelines_train_like_one_device() -> None:
    on_ranks(2, "pipelines_train_like_one_device:gpt_fused,pp2")
    on_ranks(
        4,
        "pipelines_train_like_one_device:gpt_fused,dp2pp2,3",
        "pipelines_train_like_one_device:gpt_fused,pp2tp2",
    )
