"""Holds the measurement of ops to its arithmetic, and to refusing where it cannot measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trellis_kernels.bench import ops
from trellis_kernels.bench.ops import OpRow


def test_rate_is_bytes_over_time() -> None:
    row = OpRow("decode", "mcg", microseconds=250.0, spread=(240.0, 260.0), moved_bytes=1_000_000_000)
    assert row.bytes_per_second == pytest.approx(4e12)


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ops.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_table_and_json_have_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def rows(op: str, weights: int = 0):
        return lambda: [OpRow(op, "a case", 500.0, (490.0, 510.0), 1_000_000_000, weights)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(ops, "_check_decode", lambda: None)
    groups = {name: rows(name) for name in ("rotate", "pack", "reduce")} | {"decode": rows("decode", 3_000_000_000)}
    monkeypatch.setattr(ops, "_GROUPS", groups)
    monkeypatch.setattr(ops, "_copy_rows", rows("copy"))
    assert ops.main(["--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("a device, torch ")
    assert printed[0].endswith("copy 2.00 TB/s")
    assert [line.split()[0] for line in printed[1:]] == ["copy", "rotate", "pack", "reduce", "decode"]
    assert all("100.0% of copy" in line for line in printed[1:])
    assert printed[-1].endswith("6.00 T weights/s")
    assert ops.main(["--group", "pack"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["copy", "pack"]
    assert [row["op"] for row in json.loads((tmp_path / "rows.json").read_text())] == [
        "copy",
        "rotate",
        "pack",
        "reduce",
        "decode",
    ]


@pytest.mark.gpu
def test_gpu_launches_take_turns_inside_a_graph() -> None:
    targets = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
    row = ops.measure("add", "ones", [lambda target=target: target.add_(1.0) for target in targets], 8 << 20)
    counts = {float(target[0]) for target in targets}
    assert len(counts) == 1
    assert counts.pop() >= 16
    assert 0.0 < row.spread[0] <= row.microseconds <= row.spread[1]
