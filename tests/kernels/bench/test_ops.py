"""Holds the measurement of ops to its arithmetic, and to refusing where it cannot measure or what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trellis_kernels.bench import ops
from trellis_kernels.bench.op_cases import OpCase
from trellis_kernels.bench.ops import OpRow, copy_row, measure
from trellis_kernels.bench.timing import Samples

CPU = torch.device("cpu")


def test_rates_are_counts_over_time() -> None:
    samples = Samples((240_000, 250_000, 260_000))
    row = OpRow("decode", "mcg", samples, moved_bytes=1_000_000_000, weights=2_000_000_000)
    assert row.bytes_per_second == pytest.approx(4e12)
    assert row.weights_per_second == pytest.approx(8e12)


def test_a_row_has_its_samples_and_its_error() -> None:
    target = torch.full((8,), torch.nan)
    case = OpCase("fill", "ones", [lambda: target.fill_(1.0)], 32, 5, lambda: float((target - 1.0).norm()), 0.5)
    row = measure(case, CPU, count=7)
    assert (len(row.samples.nanoseconds), row.error, row.bound, row.weights) == (7, 0.0, 0.5, 5)


def test_a_copy_counts_bytes_read_and_written() -> None:
    row = copy_row(CPU, nbytes=1 << 12, count=5)
    assert (row.moved_bytes, row.error) == (2 << 12, 0.0)


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ops.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose copy takes 500 us for 1 GB, and whose ops are fills on the CPU."""

    def row(device: torch.device, **_: object) -> OpRow:
        return OpRow("copy", "1 GiB", Samples((490_000, 500_000, 510_000)), 1_000_000_000, 0, 0.0)

    def case(op: str, error: float = 0.0, weights: int = 0):
        return lambda sizes, device: iter([OpCase(op, "a case", [lambda: None], 100_000, weights, lambda: error, 0.5)])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(ops, "copy_row", row)
    monkeypatch.setattr(ops, "ceiling_rows", lambda device: iter(()))
    monkeypatch.setattr(ops, "_samples", lambda launches, device, count: Samples((500,)))
    table = {name: case(name) for name in ("rotate", "pack", "reduce")}
    for name, made in (table | {"decode": case("decode", weights=3_000_000)}).items():
        monkeypatch.setitem(ops.GROUPS, name, made)


def test_table_and_json_have_every_row(pretend: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ["copy", "rotate", "pack", "reduce", "decode"]
    assert ops.main(["--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("a device, torch ")
    assert printed[0].endswith("copy 2.00 TB/s")
    assert [line.split()[0] for line in printed[1:]] == names
    assert "100.0% of copy" in printed[1]
    assert "10.0% of copy" in printed[2]
    assert "6.00 T weights/s" in printed[-1]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["op"] for row in rows] == names
    assert rows[0]["samples"] == {"nanoseconds": [490_000, 500_000, 510_000]}
    assert ops.main(["--group", "pack"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["copy", "pack"]


@pytest.mark.parametrize("error", [0.75, float("nan")])
def test_a_wrong_output_is_no_measurement(pretend: None, monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    def wrong(sizes: object, device: object):
        yield OpCase("rotate", "a case", [lambda: None], 100, 0, lambda: error, 0.5)

    monkeypatch.setitem(ops.GROUPS, "rotate", wrong)
    with pytest.raises(SystemExit, match=r"rotate a case: error (0\.75|nan), bound 0\.5"):
        ops.main(["--group", "rotate"])
