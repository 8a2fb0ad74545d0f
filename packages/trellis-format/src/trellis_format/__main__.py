"""Owns `python -m trellis_format`; must not know anything else."""

from __future__ import annotations

import sys

from trellis_format.entry import main

if __name__ == "__main__":
    sys.exit(main())
