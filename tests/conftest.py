"""Tiers are folders: a test in tests/unit has the marker ``unit``, and so on; those of real processes are ``long``."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and for the processes that tests start: more threads than cores are many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test asks the network for a model.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

# The same examples on every run, and no time limit for one: on a busy machine it would fail for nothing.
hypothesis.settings.register_profile("shardfx", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("shardfx")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rules that were discovered before, in the user's own cache, are not found; and none are left there. The workers
    of one run have one cache."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"))
        yield


TESTS = Path(__file__).parent
TIERS = ("unit", "virtual", "torchrun")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="torch.cuda is not available")
    seen: Counter[str] = Counter()
    for item in items:
        if (one_in := item.get_closest_marker("one_in")) and not item.get_closest_marker("slow"):
            function = item.nodeid.partition("[")[0]
            if seen[function] % one_in.args[0]:
                item.add_marker("slow")
            seen[function] += 1
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if TESTS in item.path.parents and (tier := item.path.relative_to(TESTS).parts[0]) in TIERS:
            item.add_marker(tier)
            if tier == "torchrun":  # processes take seconds to start
                item.add_marker("long")


def pytest_collection_finish() -> None:
    """What was imported stays to the end: the garbage collector need not walk over it again and again."""
    gc.collect()
    gc.freeze()
