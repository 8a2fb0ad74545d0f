"""Owns `python -m trellis_kernels`, which is the command line."""

from __future__ import annotations

import sys

from trellis_kernels.entry import main

if __name__ == "__main__":
    sys.exit(main())
