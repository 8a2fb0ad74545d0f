"""Holds the times to rows of one rank and of all, each checked against one rank, on a CPU as a rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe.parallel.ranks import run_ranks
from trellis_moe.bench.ceilings import measure_copy
from trellis_moe.bench.machine import Commit
from trellis_moe.bench.presets import TINY
from trellis_moe.bench.record import Recorder
from trellis_moe.dist_check.ranks import Process
from trellis_moe.dist_check.times import TIMED, time_layer


def rehearse(rank: int, world: int) -> dict[str, Any]:
    """Time the tiny layer; the first rank's receipt, and the memory of every rank."""
    process = Process(rank, world, torch.device("cpu"), 60.0, captures=False)
    recorder, said = None, []
    if rank == 0:
        recorder = Recorder(process.device, seconds=600.0, samples=5, tell=said.append)
        measure_copy(recorder)
    memory = time_layer(process, TINY, (4,), samples=5, recorder=recorder)
    receipt = None
    if recorder is not None:
        receipt = recorder.receipt("rehearsal", Commit("0" * 40, dirty=True)).model_dump(by_alias=True, mode="json")
    return {"memory": [use.model_dump() for use in memory], "receipt": receipt}


def test_every_way_has_a_row_beside_one_rank(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, rehearse)
    receipt = first["receipt"]
    rows = [(row["case"]["ranks"], row["case"]["scheme"], row["case"]["reduce"]) for row in receipt["rows"]]
    assert rows[0] == (1, "tp", "none")
    direct = [way.name for way in TIMED if way.reduce.one_shot_bytes]
    timed = [way for way in TIMED if way.counts(4) and way.reduce.transport == "group" and way.name not in direct]
    expected = [(2, way.scheme, way.name) for way in sorted(timed, key=lambda way: way.scheme)]
    assert rows[1:] == expected
    assert [each["what"] for each in receipt["skipped"]] == [f"tiny:mul1:3, {name}" for name in direct]
    assert all(len(row["samples_ns"]) == 5 and row["check"]["error"] <= 4e-3 for row in receipt["rows"])
    assert [use["layer"] for use in second["memory"]] == ["tiny:mul1:3 ep2", "tiny:mul1:3 tp2"]
    assert all(use["ok"] and use["planned_bytes"] > 0 for use in first["memory"] + second["memory"])
