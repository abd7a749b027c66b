"""``python -m shardfx``: the command line."""

from shardfx.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
