"""Holds plots to the same bytes for the same receipts, and to what they show."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="plots need trellis-moe[bench]")

from receipt_samples import layer_row, make_receipt, preparation
from trellis_moe.errors import MoeUnsupportedError
from trellis_moe.receipts.plots import PLOTS, draw
from trellis_moe.receipts.schema import Ceiling
from trellis_moe.receipts.store import publish

MIB = 1 << 20
DECODE = Ceiling(name="decode mul1 K=3 from registers", unit="weights", work=6_000_000, samples_ns=(1000,) * 5)
PREPARED = [preparation("1 GB layer", bound * MIB, share=0.5 + bound / 256) for bound in (16, 64)]
RECEIPT = make_receipt(
    [
        *(layer_row(tokens, 20_000 * tokens) for tokens in (1, 8, 64)),
        layer_row(64, 900_000, contender="bf16 grouped GEMM"),
        *(row for _, row in PREPARED),
    ],
    ceilings=[DECODE, *(copy for copy, _ in PREPARED)],
)


def test_equal_receipts_give_equal_bytes(tmp_path: Path) -> None:
    publish([("all", RECEIPT)], tmp_path)
    paths = draw(tmp_path)
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in PLOTS for kind in ("svg", "png")]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in draw(tmp_path)] == first
    assert all(len(content) < 40_000 for content in first)


def texts(path: Path) -> str:
    return " ".join(text.strip() for text in ElementTree.parse(path).getroot().itertext())


def test_plots_name_what_they_show(tmp_path: Path) -> None:
    publish([("all", RECEIPT)], tmp_path)
    draw(tmp_path)
    folder = tmp_path / "nvidia-h200"
    layers = texts(folder / "layers.svg")
    assert "GLM-4.5-Air, K=3 mul1" in layers
    assert "bf16 grouped GEMM" in layers
    roofline = texts(folder / "roofline.svg")
    assert "decode mul1" in roofline
    assert "device copy" in roofline
    staging = texts(folder / "staging.svg")
    assert "1 GB layer" in staging
    assert "pinned copy" in staging


def test_a_changed_time_changes_the_drawing(tmp_path: Path) -> None:
    publish([("all", RECEIPT)], tmp_path)
    before = draw(tmp_path)[2].read_bytes()
    rows = [layer_row(tokens, 30_000 * tokens) for tokens in (1, 8, 64)]
    publish([("all", make_receipt(rows))], tmp_path)
    paths = draw(tmp_path)
    assert paths[2].name == "layers.svg"
    assert paths[2].read_bytes() != before


def test_what_no_receipt_has_is_not_drawn(tmp_path: Path) -> None:
    assert draw(tmp_path) == []
    publish([("all", make_receipt([PREPARED[0][1]], ceilings=[PREPARED[0][0]]))], tmp_path)
    assert {path.stem for path in draw(tmp_path)} == {"staging"}


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MoeUnsupportedError, match=r"trellis-moe\[bench\]"):
        draw(tmp_path)
