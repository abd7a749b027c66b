"""Scenes on real processes: each rank reads its own tiles, and what they compute is what the whole image gives."""

from __future__ import annotations

from pathlib import Path

from tests.torchrun.launch import on_ranks


def test_each_rank_reads_its_tiles(tmp_path: Path) -> None:
    on_ranks(
        4,
        f"the_loop_is_that_of_virtual_ranks:{tmp_path}",
        "images_are_decoded_once",
        "what_is_decoded_badly_is_an_error",
        f"a_scene_is_predicted_by_all:{tmp_path}",
        "draws_that_differ_are_an_error",
    )
