"""Holds the timing of a linear to a checked row, on any device."""

from __future__ import annotations

import json

import pytest
import torch

from trellis_format.rates import Rate
from trellis_kernels.bench.linear import SHAPES, main, random_linear


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_are_checked_and_timed(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trellis_kernels.bench.linear._TURN_BYTES", 1 << 17)
    main(["--shape", "256x128", "--rows", "1", "9", "--samples", "2", "--rate", "2.5", "--device", device])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["k"], row["n"], row["rows"], row["rate"]) for row in rows] == [
        (256, 128, 1, "2.5"),
        (256, 128, 9, "2.5"),
    ]
    for row in rows:
        assert row["error"] < 4e-3
        assert row["microseconds"] > 0
        assert row["bf16_microseconds"] > 0


def test_seeds_give_other_codes_of_unit_gain() -> None:
    first, second = (random_linear(128, 256, "mcg", Rate.of(3), device="cpu", seed=seed) for seed in (0, 1))
    assert not torch.equal(first.codes, second.codes)
    assert (first.k, first.n, first.bias) == (128, 256, None)
    assert all(side % 128 == 0 for shape in SHAPES for side in shape)
