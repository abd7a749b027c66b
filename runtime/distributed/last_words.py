"""A process that ends between two calls says so, and why, to the others of the job.

They wait for it at the start of their next call: its connections close, they ask the job's store, and find what it
said (:mod:`.peer_failure`). The traceback is printed first, so that it stands on the terminal before others end.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.util import Finalize
from types import TracebackType

import torch.distributed as dist

from .groups import leave_groups
from .peer_failure import tell

_watched: set[int] = set()


def tell_when_it_ends() -> None:
    """From now on this process tells the others when it ends: by an exception, or in order."""
    process = os.getpid()
    if process in _watched:
        return
    _watched.add(process)
    before = sys.excepthook

    def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        if os.getpid() == process:
            _tell(error)

    sys.excepthook = raised
    Finalize(None, lambda: _tell(sys.exc_info()[1]), exitpriority=100)


def _tell(error: BaseException | None) -> None:
    """Tell how this process ends; one that failed leaves its groups, for it may take a while to end."""
    if not dist.is_initialized():
        return
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__  # torch.multiprocessing raises it in the place of the error
    if error is None or (isinstance(error, SystemExit) and not error.code):
        tell({"left": "it has come to the end of its program"})
        return
    lines = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    tell({"left": f"{lines[:800]}{where}"})
    leave_groups()
