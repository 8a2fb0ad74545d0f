"""Holds the writing side of conversion to its files, and each target to the bytes that it says it needs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from exl3_files import random_layer, write_checkpoint
from trellis_format.convert_source import open_source
from trellis_format.convert_target import TARGETS
from trellis_format.detect import CONTAINERS, container_of
from trellis_format.files.header import read_header
from trellis_format.writer import OutputDirectory

CONFIG = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}
CODES = {"exl3": ".trellis", "exl3-v1": "codes", "native": "codes"}


def test_every_container_is_a_target() -> None:
    assert tuple(TARGETS) == CONTAINERS
    assert all(target.container == name for name, target in TARGETS.items())


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("outside", [0, 3])
def test_files_and_bytes(tmp_path: Path, container: str, outside: int) -> None:
    tensors = random_layer(np.random.default_rng(0), layer=1) | random_layer(np.random.default_rng(1), layer=12)
    tensors |= {f"other{number}": np.ones(1000, np.float32) for number in range(outside)}
    target, told = TARGETS[container], []
    with closing(open_source(write_checkpoint(tmp_path / "source", tensors, config=CONFIG))) as source:
        sources = {layer: source.read_layer(layer)[0] for layer in source.layers}
        target.check(sources)
        with OutputDirectory(tmp_path / "out", fingerprint="f") as directory:
            target.write(
                directory, sources, source.read_layer, source.outside, source.names, shards=2, on_bytes=told.append
            )
    headers = [read_header(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    entries = [entry for header in headers for entry in header.entries.values()]
    assert sum(told) == sum(entry.nbytes for entry in entries)
    codes = sum(entry.nbytes for entry in entries if entry.name.endswith(CODES[container]))
    assert codes == sum(map(target.layer_bytes, sources.values()))
    names = [header.path.name for header in headers]
    expected = {
        "exl3": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        "exl3-v1": ["exl3-layer-00001.safetensors", "exl3-layer-00012.safetensors"],
        "native": ["trellis-layer-00001.safetensors", "trellis-layer-00012.safetensors"],
    }[container]
    beside = [f"outside-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(names) == sorted(expected + (beside if outside and container != "exl3" else []))
    assert container_of(tmp_path / "out") == container
