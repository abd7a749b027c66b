"""All benchmarks, one after the other: ``make bench``, or ``python -m benchmarks``."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("benchmarks.step_time", "benchmarks.plan_scale", "benchmarks.verify_scale", "benchmarks.mutants")


def main() -> int:
    worst = 0
    for name in BENCHMARKS:
        print(f"\n== python -m {name}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, "-m", name], check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
