"""Owns what the bytes of trellis-quantised weights mean; must not know torch, devices or ranks.

- `trellis_format.checkpoint` opens a checkpoint from its headers.
- `trellis_format.exl3` describes the experts of its layers.
- `trellis_format.container` and `trellis_format.native` read and write slot-major containers.
- `trellis_format.inspect` reports what it holds, and what breaks a rule.
- `trellis_format.reference` computes with it in float64.
"""

from __future__ import annotations
