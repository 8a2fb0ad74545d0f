"""Owns native trellis weights: a model's `TrellisConfig`, one manifest, one slot-major file for each layer.

It must not know ranks or devices.
"""

from __future__ import annotations

from trellis_format.native.config import TrellisConfig, parse_config, parse_quantization_config
from trellis_format.native.layer import NativeLayer, source_of, trellis_from_native
from trellis_format.native.manifest import NativeManifest, parse_manifest, read_manifest
from trellis_format.native.reader import read_layer
from trellis_format.native.scales import ScaleFactors

__all__ = [
    "NativeLayer",
    "NativeManifest",
    "ScaleFactors",
    "TrellisConfig",
    "parse_config",
    "parse_manifest",
    "parse_quantization_config",
    "read_layer",
    "read_manifest",
    "source_of",
    "trellis_from_native",
]
