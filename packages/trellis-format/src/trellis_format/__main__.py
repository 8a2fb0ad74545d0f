"""Owns `python -m trellis_format`; must not know anything else."""

from __future__ import annotations

import sys

from trellis_format.cli import main

sys.exit(main())
