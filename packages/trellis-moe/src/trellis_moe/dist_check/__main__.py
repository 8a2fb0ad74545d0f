"""Owns `python -m trellis_moe.dist_check`; must not do more than call it."""

from __future__ import annotations

import sys

from trellis_moe.dist_check.cli import main

if __name__ == "__main__":
    sys.exit(main())
