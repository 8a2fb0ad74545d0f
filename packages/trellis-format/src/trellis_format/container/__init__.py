"""Owns the `exl3-v1` container: one manifest, and one slot-major file for each layer of experts.

It must not know ranks or devices.
"""

from __future__ import annotations

from trellis_format.container.adapter import trellis_from_container
from trellis_format.container.layer import ContainerLayer, ContainerPairLayer
from trellis_format.container.manifest import Manifest, ManifestHead, parse_manifest, read_manifest
from trellis_format.container.reader import read_layer

__all__ = [
    "ContainerLayer",
    "ContainerPairLayer",
    "Manifest",
    "ManifestHead",
    "parse_manifest",
    "read_layer",
    "read_manifest",
    "trellis_from_container",
]
