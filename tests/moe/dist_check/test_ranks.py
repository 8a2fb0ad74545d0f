"""Holds a rank to the environment that describes it."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from trellis_moe import MoeValueError
from trellis_moe.dist_check.ranks import join_ranks


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a rank that is alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    named = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in named.items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_is_what_its_environment_says(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    with join_ranks("cpu", 5.0) as process:
        assert (process.rank, process.world, process.device.type, process.timeout) == (0, 1, "cpu", 5.0)
        assert not process.captures
        assert dist.get_backend() == "gloo"
        process.say("a line")
    assert capsys.readouterr().err == "dist_check: a line\n"
    assert not dist.is_initialized()


def test_a_process_that_is_no_rank_is_told_how_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(MoeValueError, match=r"RANK.* not set; start the ranks with torchrun or with --launch N"):
        join_ranks(None, 5.0).__enter__()


def test_more_ranks_than_gpus_are_refused(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MoeValueError, match="1 ranks need 1 CUDA devices, torch sees 0; or give --share-gpus"):
        join_ranks("cuda", 5.0).__enter__()
    with pytest.raises(MoeValueError, match="--share-gpus: torch sees no CUDA device"):
        join_ranks(None, 5.0, share_gpus=True).__enter__()
