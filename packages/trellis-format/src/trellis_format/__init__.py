"""Owns what the bytes of trellis-quantised weights mean; must not know torch, devices or ranks.

- `trellis_format.checkpoint` opens a checkpoint from its headers.
- `open_layer_source` describes one layer of a checkpoint of any container; `container_of` tells which one it is.
- `TrellisSource` is such a description, and is made of the other classes here.
- `trellis_format.exl3` describes the experts of EXL3 layers.
- `trellis_format.container` and `trellis_format.native` read and write slot-major containers.
- `trellis_format.inspect` reports what it holds, and what breaks a rule.
- `trellis_format.reference` computes with it in float64.

A name is imported when it is first asked for: numpy takes time to load, and the command must answer an interrupt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trellis_format.lazy import lazy_names

if TYPE_CHECKING:
    from trellis_format.activations import Activation
    from trellis_format.detect import container_of
    from trellis_format.extent import TrellisExtent
    from trellis_format.layer_source import open_layer_source
    from trellis_format.rate_table import RateTable
    from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights
    from trellis_format.transform import ExpertTransform

__all__ = [
    "Activation",
    "CodeLayout",
    "ExpertGeometry",
    "ExpertTransform",
    "Projection",
    "RateTable",
    "TrellisExtent",
    "TrellisSource",
    "TrellisWeights",
    "container_of",
    "open_layer_source",
]

_MODULES = ("detect", "layer_source", "activations", "extent", "transform", "rate_table", "source")

__getattr__, __dir__ = lazy_names(__name__, __all__, _MODULES)
