"""Owns what all tests of trellis-kernels share: kernels are compiled afresh unless a test chooses a cache."""

from __future__ import annotations

import os

from trellis_kernels.environment import CACHE_VARIABLE

os.environ[CACHE_VARIABLE] = "off"
