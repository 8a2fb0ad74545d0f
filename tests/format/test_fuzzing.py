"""Holds every reader to its own errors and to bounded memory, with mutated headers, manifests and configurations."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzzing import Fuzzer, main, mutate
from trellis_format.checkpoint import open_checkpoint
from trellis_format.errors import FormatError

MEMORY = 24 << 20
"""Most bytes that a case may allocate; its files have some tens of KiB."""


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_files_give_own_errors_alone(fuzzer: Fuzzer, seed: int) -> None:
    fuzzer.run(seed)


def test_mutated_files_take_bounded_memory(fuzzer: Fuzzer) -> None:
    tracemalloc.start()
    try:
        for seed in range(60):
            fuzzer.run(seed)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def test_a_mutation_follows_from_its_seed_and_changes_something() -> None:
    text = json.dumps({"a": [1, {"b": "c"}], "d": {"e": 2.5}}).encode()
    changed = [mutate(random.Random(seed), text) for seed in range(100)]
    assert changed == [mutate(random.Random(seed), text) for seed in range(100)]
    assert sum(it != text for it in changed) > 80
    assert len(set(changed)) > 70


def test_a_reader_that_raises_another_error_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)  # of this process, for good
    monkeypatch.setattr(Fuzzer, "run", lambda _, seed: {5: 1}[seed])
    assert main(["--count", "3", "--seed", "4"]) == 1
    out = capsys.readouterr().out
    assert "seed 4 failed:" in out
    assert "KeyError: 6" in out
    assert out.endswith("3 cases, failed: [4, 6]\n")
    assert main(["--only", "5"]) == 0


def sparse_shard(path: Path, nbytes: int) -> None:
    header = json.dumps({f"{path.stem}.hole": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + nbytes)


def test_a_terabyte_of_holes_opens_in_constant_memory(tmp_path: Path) -> None:
    for number in range(64):
        sparse_shard(tmp_path / f"{number}.safetensors", 16 << 30)
    tracemalloc.start()
    try:
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.nbytes == 1 << 40
            assert checkpoint.bytes_read == 0
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_header_that_claims_a_terabyte_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    sparse_shard(path, 1 << 30)
    with path.open("r+b") as stream:
        stream.write((1 << 40).to_bytes(8, "little"))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="exceeds the bound"):
            open_checkpoint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
