"""Owns `python -m trellis_moe`."""

from __future__ import annotations

import sys

from trellis_moe.cli import main

if __name__ == "__main__":
    sys.exit(main())
