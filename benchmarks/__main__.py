"""All benchmarks, one after the other: ``make bench``, or ``python -m benchmarks``."""

from __future__ import annotations

import subprocess
import sys

NAMES = (
    "step_time script_steps trainer_time step_memory pipeline_time timeline collectives plan_scale pipeline_scale "
    "verify_scale memory_table predicted_step recompute_table long_context decoder_step tiles chunked_loss loop_scale "
    "tables mutants"
)
BENCHMARKS = tuple(f"benchmarks.{name}" for name in NAMES.split())


def main() -> int:
    worst = 0
    for name in BENCHMARKS:
        print(f"\n== python -m {name}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, "-m", name], check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
