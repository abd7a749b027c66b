"""A process that measures some cells of one part, started by :mod:`.processes`."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from .context import Context
from .device import Device


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("told", help="JSON: part, module, cells, device, rehearse, seconds, cell_seconds, folder")
    told = json.loads(parser.parse_args().told)
    module = importlib.import_module(told.pop("module"))
    device, folder = Device(told.pop("device")), Path(told.pop("folder"))
    module.run(Context(device=device, folder=folder, **told))


if __name__ == "__main__":
    main()
