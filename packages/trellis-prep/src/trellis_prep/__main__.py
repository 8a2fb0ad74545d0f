"""Owns `python -m trellis_prep`; must not know anything else."""

from __future__ import annotations

import sys

from trellis_prep.entry import main

if __name__ == "__main__":
    sys.exit(main())
