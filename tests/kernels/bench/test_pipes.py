"""Holds the rows of instruction mixes to what they name."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.bench.pipes import main


def test_mixes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "names of mixes" in capsys.readouterr().out
    with pytest.raises(KeyError, match="nothing"):
        main(["nothing"])


@pytest.mark.gpu
def test_a_row_names_its_mix(capsys: pytest.CaptureFixture[str]) -> None:
    main(["permute", "--warps", "8"])
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["mix"] == "permute"
    assert 1.5 < row["cycles"] < 3
