"""Holds the judgement on a lost rank to every way in which it can go wrong."""

from __future__ import annotations

import pytest

from trellis_moe.dist_check.launch import EXIT_LOST, Ended, judge_loss, launch

KILLED = Ended(-9, 10.0, "")


def lost(seconds: float = 12.0, code: int = EXIT_LOST, err: str = "rank 0 of 2: it is gone") -> Ended:
    return Ended(code, seconds, err)


def test_ranks_that_say_so_in_time_are_right() -> None:
    assert judge_loss([lost(), KILLED, lost(30.0)], 1, 20.0) == []


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        ([lost(), Ended(0, 10.0, "")], "rank 1 was to be killed and ended with 0"),
        ([lost(code=0), KILLED], "rank 0 ended with 0, not 3"),
        ([lost(err="Traceback"), KILLED], "rank 0 did not say what happened"),
        ([lost(45.0), KILLED], "rank 0 ended 35.0 s after the loss, the timeout is 20 s"),
    ],
)
def test_each_fault_is_told(ended: list[Ended], fault: str) -> None:
    assert judge_loss(ended, 1, 20.0) == [fault]


def test_ranks_are_processes_whose_words_are_kept() -> None:
    first, second = launch(2, ["--launch", "0"], seconds=120.0)
    assert (first.code, second.code) == (2, 2)
    assert first.err == second.err == "dist_check: error: --launch must be at least 1, got 0\n"
    assert 0 < first.seconds < 120


def test_ranks_that_do_not_end_are_killed() -> None:
    (end,) = launch(1, [], seconds=0.0)
    assert end.code == -9
