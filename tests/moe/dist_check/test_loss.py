"""Holds ranks to noticing that one of them died; processes are killed for it."""

from __future__ import annotations

import sys

import pytest
from _pytest.capture import CaptureFixture

from trellis_moe.dist_check.cli import main


@pytest.mark.skipif(sys.platform != "linux", reason="gloo tells of a closed connection there")
def test_the_ranks_that_are_left_say_which_collective_failed(capfd: CaptureFixture[str]) -> None:
    assert main(["--launch", "3", "--kill-rank", "1", "--device", "cpu", "--timeout", "60"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1", "rank 2"]
    assert "exit code -9" in lines[1]
    for rank in (0, 2):
        assert "exit code 3" in lines[rank]
        assert f"rank {rank} of 3: " in lines[rank]
        assert " failed: " in lines[rank]
