"""``python -m tests.torchrun.server``: a process that has imported torch and shardfx forks what tests ask for.

Each line it reads is a job as JSON: a module of this folder, the arguments of its ``main``, the working folder and the
file for its output. It answers with the process and, when that has ended, its exit code. Importing takes longer than
most of what is tested.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch
import transformers  # noqa: F401

from . import fork, lost

MAINS = {"fork": fork.main, "lost": lost.main}


def job(module: str, arguments: list[str], folder: str, output: str) -> int:
    """In a process of its own."""
    os.setsid()
    to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(to, stream)
    os.chdir(folder)
    code = 1
    try:
        code = MAINS[module](arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os._exit(job(**json.loads(line)))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
