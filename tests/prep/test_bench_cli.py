"""Holds the subcommand `bench` to both of its reports and to its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from prep.samples import random_layer, write_checkpoint
from trellis_prep import bench_cli, cli
from trellis_prep.bench import PreparationMeasurement
from trellis_prep.bench_cli import BENCH_SCHEMA, report_json, write_bench_text

SMALL = ("--hidden", "256", "--intermediate", "256", "--experts", "3", "--repeats", "2")


def measurement(**changes: object) -> PreparationMeasurement:
    """One with round numbers."""
    values = {
        "device": "cpu", "nbytes": 1000, "final_bytes": 2000, "layers": 2, "bound_bytes": 500, "slots": 4,
        "slot_bytes": 100, "readers": 3, "pollers": 0, "workers": False,
        "samples_ns": (100, 200, 300), "alone_samples_ns": (400, 400, 400),
        "copy_samples_ns": (50, 100, 100), "peak_host_bytes": 400, "peak_device_bytes": None, "is_exact": True,
    }  # fmt: skip
    return PreparationMeasurement(**(values | changes))  # type: ignore[arg-type]


def test_json_has_raw_samples_and_what_follows() -> None:
    document = report_json([measurement()])
    (row,) = document["measurements"]
    assert document["schema"] == BENCH_SCHEMA
    assert document["gpu"] is None
    assert row["samples_ns"] == (100, 200, 300)
    assert (row["gb_per_second"], row["copy_gb_per_second"], row["share_of_copy"]) == (5.0, 10.0, 0.5)
    assert json.loads(json.dumps(document))["measurements"][0]["peak_device_bytes"] is None


def test_text_says_rates_share_and_peaks() -> None:
    stream = io.StringIO()
    write_bench_text([measurement(is_exact=False)], stream)
    text = stream.getvalue()
    for part in (
        "1,000 bytes to cpu, bound 500 bytes (4 slots of 100), 3 readers", "5.00 GB/s", "10.00 GB/s", "share 50.0%",
        "holding 2: 2,000 bytes; beyond them host 400 bytes, device unknown; codes WRONG",
    ):  # fmt: skip
        assert part in text


def test_text_says_who_filled_the_slots() -> None:
    stream = io.StringIO()
    write_bench_text([measurement(pollers=12), measurement(workers=True)], stream)
    assert "(4 slots of 100), 12 pollers:" in stream.getvalue()
    assert "(4 slots of 100), the kernel's workers:" in stream.getvalue()


def test_command_measures_random_codes_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", *SMALL, "--folder", str(tmp_path), "--json", "--max-bytes", "200000", "100000", "--held", "2"]
    assert cli.main(arguments) == cli.EXIT_OK
    rows = json.loads(capsys.readouterr().out)["measurements"]
    assert [row["bound_bytes"] for row in rows] == [200_000, 100_000]
    assert all(row["is_exact"] and row["layers"] == 2 and row["nbytes"] == rows[0]["nbytes"] for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_command_measures_a_share_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, random_layer(experts=4))
    options = [
        "--checkpoint",
        str(tmp_path),
        "--tp-size",
        "3",
        "--tp-rank",
        "2",
        "--repeats",
        "1",
        "--readers",
        "2",
        "--max-bytes",
        "150000",
    ]
    assert cli.main(["bench", *options]) == cli.EXIT_OK
    assert "2 readers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--rate", "1.3"], "not a multiple of 1/2"),
        (["--device", "cuda:77"], "cuda:77 is not there"),
        (["--max-bytes", "10"], "insufficient"),
        (["--checkpoint", "/nonexistent"], "nonexistent"),
    ],
)
def test_wrong_use_exits_with_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *SMALL, "--folder", str(tmp_path), *arguments]) == cli.EXIT_UNUSABLE
    assert message in capsys.readouterr().err


def test_wrong_codes_exit_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_cli, "measure_preparation", lambda *_, **__: measurement(is_exact=False))
    assert cli.main(["bench", *SMALL, "--max-bytes", "100000"]) == cli.EXIT_FAILED
    assert "codes WRONG" in capsys.readouterr().out
