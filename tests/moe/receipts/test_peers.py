"""Holds measurements of other projects to their schema, and to layers that are measured here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trellis_moe.bench.presets import PRESETS
from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.figures import UNQUANTISED
from trellis_moe.receipts.packing import pack
from trellis_moe.receipts.peers import Peer, load_peers

BENCHMARKS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
ROWS: list[dict[str, object]] = [
    {"geometry": "GLM-4.5-Air", "codebook": "mul1", "k": "3", "tokens": 8, "ms": 0.459},
    {"geometry": "Qwen3-30B-A3B", "codebook": None, "k": None, "tokens": 8, "ms": 0.25},
]
CONTENT = {
    "schema": "trellis-moe/peer",
    "schema_version": 1,
    "contender": "another 1.0",
    "source": "its package",
    "method": "median of 20",
    "gpu": "NVIDIA H200",
    "torch": "2.11",
    "date": "2026-01-31",
    "rows": ROWS,
}


def test_times_are_found_by_layer_and_tokens() -> None:
    peer = Peer.model_validate(CONTENT)
    assert peer.time("GLM-4.5-Air", "mul1", "3", 8) == 0.459
    assert peer.time("GLM-4.5-Air", "mul1", "4", 8) is None
    assert peer.time("GLM-4.5-Air", "mul1", "3", 9) is None
    assert peer.time("Qwen3-30B-A3B", "mcg", "4", 8) == 0.25  # unquantised weights serve every rate


def test_what_the_repository_has_is_of_measured_layers() -> None:
    peers = load_peers(BENCHMARKS)
    assert {peer.contender for peer in peers} == {"exllamav3 1.6.5", UNQUANTISED}
    geometries = {preset.name for preset in PRESETS.values()}
    for peer in peers:
        assert {row.geometry for row in peer.rows} <= geometries
        places = [(row.geometry, row.codebook, row.k, row.tokens) for row in peer.rows]
        assert len(places) == len(set(places))


@pytest.mark.parametrize(("name", "value"), [("source", None), ("speed", 3), ("schema_version", 2), ("rows", [3])])
def test_other_files_are_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "another.json").write_text(json.dumps(CONTENT | {"rows": pack(ROWS)} | {name: value}))
    with pytest.raises(MoeValueError, match=rf"another\.json.*{name}"):
        load_peers(tmp_path)
