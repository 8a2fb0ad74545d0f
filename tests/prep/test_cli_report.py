"""Holds what the command says to the numbers that it was given."""

from __future__ import annotations

import io
import json

import pytest

from trellis_prep.cli_report import SCHEMA, LayerRow, ProgressLine, RunReport, write_text


def row(layer: int, **fields: object) -> LayerRow:
    values = {
        "layer": layer,
        "path": f"model.layers.{layer}.experts",
        "first_channel": 128,
        "channels": 256,
        "owners": {"codes": 3_000_000_000, "input_scales": 1000},
        "staging_bytes": 4096,
        "seconds": 1.5,
    }
    return LayerRow(**(values | fields))  # type: ignore[arg-type]


def report(*rows: LayerRow, dry_run: bool = False) -> RunReport:
    sample = (1_000_000, 0.0005) if dry_run else (0, 0.0)
    return RunReport("a/model", "cuda:0", 1, 3, 65536, dry_run, *sample, rows)


def text(given: RunReport) -> str:
    stream = io.StringIO()
    write_text(given, stream)
    return stream.getvalue()


def test_totals_are_sums() -> None:
    given = report(row(0), row(1, owners={"codes": 5, "bias.up": 7}, seconds=0.5))
    assert given.owners == {"codes": 3_000_000_005, "input_scales": 1000, "bias.up": 7}
    assert given.nbytes == 3_000_001_012
    assert given.seconds == 2.0
    assert report(row(0), row(1, seconds=None)).seconds is None


def test_text_of_a_run() -> None:
    shown = text(report(row(0, host_peak_above_weights=5000, device_peak_above_weights=512))).splitlines()
    extras = ", 2.00 GB/s, host peak 5,000 bytes above the weights, device peak 512 bytes above the weights"
    extras += ", host ring 4,096 bytes"
    assert shown == [
        "a/model: rank 1 of 3 on cuda:0, staging of at most 65,536 bytes",
        "layer 0 (model.layers.0.experts): channels 128..384, 3,000,001,000 bytes, took 1.500 s" + extras,
        "  codes              3,000,000,000 bytes",
        "  input_scales               1,000 bytes",
        "  all                3,000,001,000 bytes",
        "1 layers took 1.500 s",
    ]


def test_text_of_a_dry_run_says_what_its_time_rests_on() -> None:
    last = text(report(row(0), row(1), dry_run=True)).splitlines()[-1]
    assert last == "2 layers would take 3.000 s, expected from a sample of 1,000,000 bytes read at 2.00 GB/s"
    assert "would take an unknown time" in text(report(row(0, seconds=None), dry_run=True))


def test_names_cannot_command_a_terminal() -> None:
    assert "\x1b" not in text(report(row(0, path="a\x1b[2Jb")))
    assert "a\\x1b[2Jb" in text(report(row(0, path="a\x1b[2Jb")))


def test_json_has_every_number() -> None:
    document = json.loads(json.dumps(report(row(0), dry_run=True).as_json()))
    assert document["schema"] == SCHEMA
    assert (document["tp_rank"], document["tp_size"], document["dry_run"]) == (1, 3, True)
    assert (document["sampled_bytes"], document["sampled_seconds"]) == (1_000_000, 0.0005)
    (layer,) = document["layers"]
    assert layer["owners"] == {"codes": 3_000_000_000, "input_scales": 1000}
    assert (layer["bytes"], layer["seconds"]) == (3_000_001_000, 1.5)
    assert layer["gb_per_second"] == pytest.approx(2.0, rel=1e-6)
    assert document["total"] == {"owners": layer["owners"], "bytes": 3_000_001_000, "seconds": 1.5}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_is_drawn_on_a_terminal_up_to_its_end() -> None:
    stream = Terminal()
    line = ProgressLine(stream, 2000)
    line.update(100)
    line.update(2000)
    line.finish()
    drawn = stream.getvalue().split("\r")[-1]
    assert drawn.startswith(f"[{'#' * 30}] 100% of 2,000 bytes, ")
    assert drawn.endswith("GB/s \n")


def test_nothing_is_drawn_elsewhere() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, 2000)
    line.update(2000)
    line.finish()
    assert stream.getvalue() == ""


def test_nothing_to_do_is_all_of_it() -> None:
    stream = Terminal()
    ProgressLine(stream, 0).update(0)
    assert "100% of 0 bytes" in stream.getvalue()
