"""Owns access to files: bounded JSON, strict safetensors headers, positional reads.  It must not know quantisation."""

from __future__ import annotations

from trellis_format.files.arrays import ArrayView, FileArray, MemoryArray
from trellis_format.files.header import ShardHeader, TensorEntry, read_header
from trellis_format.files.strict_json import parse_json, read_json

__all__ = [
    "ArrayView",
    "FileArray",
    "MemoryArray",
    "ShardHeader",
    "TensorEntry",
    "parse_json",
    "read_header",
    "read_json",
]
