"""Holds the shown report to the report: the same facts plainly and with rich, and nothing that a terminal obeys."""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, random_linear, write_checkpoint
from trellis_format.inspect import inspect_checkpoint
from trellis_format.report import InspectReport
from trellis_format.text import sections, write_plain, write_report

RNG = np.random.default_rng(0)
NASTY = "\x1b[31mred\x1b]0;title\x07 [bold]no[/bold] \x9bK \u202eesrever \u2028 \x00 \r\x08"


def report_of(folder: Path, tensors: dict[str, Any], **options: Any) -> InspectReport:
    return inspect_checkpoint(write_checkpoint(folder / "c", tensors, **options))


def plain(report: InspectReport) -> str:
    stream = io.StringIO()
    write_plain(report, stream)
    return stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_section_is_shown(checkpoint_path: Path) -> None:
    report = inspect_checkpoint(checkpoint_path)
    text = plain(report)
    for section in sections(report):
        assert f"\n{section.title}\n" in f"\n{text}"
        for row in section.rows:
            assert re.search(r"\s+".join(re.escape(cell) for cell in row if cell), text)
    assert text.endswith("\n0 errors, 0 warnings, 0 notes\n")


def test_numbers_of_the_report_are_in_the_text(checkpoint_path: Path) -> None:
    report = inspect_checkpoint(checkpoint_path)
    text = plain(report)
    for layer in report.layers:
        assert f"{layer.bytes:,}" in text
        assert f"{layer.bits.total:.4f}" in text
    assert f"{report.bytes.total:,}" in text
    for group in report.skipped:
        assert group.pattern in text


def test_equal_neighbours_share_a_row(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    for layer in (0, 1, 2, 4, 5):
        tensors |= random_layer(RNG, layer=layer, bits=4 if layer == 5 else 3)
    tensors |= random_layer(RNG, layer=0, name=lambda layer, e, word: f"mtp.layers.{layer}.mlp.experts.{e}.{word}")
    (section,) = (s for s in sections(report_of(tmp_path, tensors)) if s.title == "Layers with experts")
    assert [row[0] for row in section.rows] == ["0-2", "4", "5", "0 (mtp)"]


def test_layers_of_two_paths_are_not_joined(tmp_path: Path) -> None:
    tensors = random_layer(RNG, layer=0) | random_layer(
        RNG, layer=1, name=lambda layer, e, word: f"mtp.layers.{layer}.mlp.experts.{e}.{word}"
    )
    (section,) = (s for s in sections(report_of(tmp_path, tensors)) if s.title == "Layers with experts")
    assert [row[0] for row in section.rows] == ["0", "1 (mtp)"]


def test_rates_and_codebooks_are_told_apart(tmp_path: Path) -> None:
    rates = {"gate_proj": 2, "up_proj": 2, "down_proj": 2.5}
    tensors = random_layer(RNG, codebook="mul1", bits=lambda e, word: rates[word] + (e == 1 and word == "up_proj"))
    (section,) = (s for s in sections(report_of(tmp_path, tensors)) if s.title == "Layers with experts")
    (row,) = section.rows
    cells = dict(zip(section.columns, row, strict=True))
    assert cells["K"] == "gate 2, up 2-3, down 2.5"
    assert cells["codebook"] == "mul1"
    assert (cells["experts"], cells["hidden"], cells["even ranks"]) == ("2", "128", "1, 2")


def test_a_broken_layer_is_marked(tmp_path: Path) -> None:
    tensors = random_layer(RNG) | {"model.layers.0.mlp.experts.0.up_proj.suh": np.zeros(1, np.float16)}
    report = report_of(tmp_path, tensors, config={"hidden_size": 128})
    text = plain(report)
    assert "2 (not readable)" in text
    assert "broken-linear" in text
    assert re.search(r"\n1 error, \d+ warnings?, \d+ notes?\n$", text)


def test_padding_is_shown(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", "hidden_size": 100, "intermediate_size": 256}
    text = plain(report_of(tmp_path, random_layer(RNG), config=config))
    assert "100 in 128" in text
    assert "swigluoai, limit 7, alpha 1.702, beta 1 (config.json model_type = 'gpt_oss')" in text


def test_packed_signs_are_shown(tmp_path: Path) -> None:
    assert "6 with packed signs" in plain(report_of(tmp_path, random_layer(RNG, packed=True)))


def test_the_same_statement_of_two_files_is_one_row(tmp_path: Path) -> None:
    stated = {"quant_method": "exl3", "codebook": "mcg"}
    report = report_of(
        tmp_path, random_layer(RNG), config={"quantization_config": stated}, quantization=stated | {"bits": 3}
    )
    (section,) = (s for s in sections(report) if s.title == "Stated by the configuration")
    assert section.rows == (
        ("quant_method", "exl3", "config.json, quantization_config.json"),
        ("codebook", "mcg", "config.json, quantization_config.json"),
        ("bits", "3", "quantization_config.json"),
    )


def nasty_report(folder: Path) -> InspectReport:
    tensors = random_layer(RNG) | {
        f"{NASTY}.weight": np.zeros(2, np.float16),
        **random_linear(RNG, f"{NASTY}.proj", 128, 128),
        f"{NASTY}.proj.suh": np.zeros(2, np.float16),
        f"{NASTY}.proj2.suh": np.zeros(2, np.float16),
    }
    config = {"model_type": NASTY, "architectures": [NASTY], "hidden_act": NASTY}
    config["quantization_config"] = {"quant_method": NASTY, "codebook": NASTY, "version": NASTY}
    return report_of(folder, tensors, config=config)


def test_names_cannot_drive_a_terminal(tmp_path: Path) -> None:
    text = plain(nasty_report(tmp_path))
    assert {character for character in text if unicodedata.category(character)[0] == "C"} == {"\n"}
    assert r"\x1b[31mred" in text


def test_a_stream_that_is_no_terminal_gets_plain_text(checkpoint_path: Path) -> None:
    report = inspect_checkpoint(checkpoint_path)
    stream = io.StringIO()
    write_report(report, stream)
    assert stream.getvalue() == plain(report)


def test_without_rich_a_terminal_gets_plain_text(checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = inspect_checkpoint(checkpoint_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    stream = Terminal()
    write_report(report, stream)
    assert stream.getvalue() == plain(report)


def words(text: str) -> str:
    """What is left of a drawing: no styles, no lines, no white space."""
    return re.sub(r"\x1b\[[0-9;]*m|[\s─━│]", "", text)


def test_rich_shows_the_same(tmp_path: Path, checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "4000")  # so that no cell is folded
    for report in (inspect_checkpoint(checkpoint_path), nasty_report(tmp_path)):
        stream = Terminal()
        write_report(report, stream)
        shown = stream.getvalue()
        assert words(shown) == words(plain(report))
        controls = {c for c in re.sub(r"\x1b\[[0-9;]*m", "", shown) if unicodedata.category(c)[0] == "C"}
        assert controls <= {"\n"}
