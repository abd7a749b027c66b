"""Features of a whole step on real ranks, alone and in pairs (see :mod:`.workers` and :mod:`tests.pairs`)."""

from __future__ import annotations

import faulthandler
import os

from shardfx.module.programs import STEP, TRAIN
from tests.live_memory import check_footprint, held_in_a_step
from tests.pairs import Names, alone_and_in_pairs, beside_one_device, hints_of, model_of

from .program_workers import WORKERS
from .workers import worker

__all__ = ["WORKERS"]


def fitting(pairs: bool) -> list[Names]:
    """Those whose mesh has as many ranks as there are; ``auto`` and ``memory`` plan others, too, to know a budget."""
    faulthandler.cancel_dump_traceback_later()  # they take longer than what is stuck, and traces of who works may crash
    names = [each for each in alone_and_in_pairs() if (len(each) == 2) is pairs]
    return [each for each in names if hints_of(each)[0].size == int(os.environ["WORLD_SIZE"])]


@worker
def features_equal_one_device(model: str, first: str, every: str) -> None:
    """Five steps of each feature alone, and of one pair in so many."""
    for names in (*fitting(False), *fitting(True)[int(first) :: int(every)]):
        try:
            beside_one_device(model, names)
        except Exception as error:
            error.add_note(f"{model}: {' + '.join(names)}")
            raise


@worker
def features_hold_what_is_predicted(model: str) -> None:
    """Call by call, of each feature alone."""
    for names in fitting(False):
        pm, case = beside_one_device(model, names), model_of(model)
        ahead, steps = pm._target.ahead_here, pm._compiled.hints.optimizer is not None
        for run, kinds in ((pm, TRAIN), *([(pm.step, STEP)] if steps else [])):
            for rank, held in held_in_a_step(pm, case, run).items():
                try:
                    check_footprint(pm._programs.running(rank, kinds), held, exact=False, ahead=ahead)
                except AssertionError as error:
                    error.add_note(f"{model}: {names}, rank {rank}")
                    raise
