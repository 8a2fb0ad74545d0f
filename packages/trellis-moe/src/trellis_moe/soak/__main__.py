"""Runs the soak: `python -m trellis_moe.soak`."""

from __future__ import annotations

import sys

from trellis_moe.soak.cli import main

if __name__ == "__main__":
    sys.exit(main())
