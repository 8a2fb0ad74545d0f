"""Holds `trellis-moe bench` to receipts that say what was asked, and to what it makes of them."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from receipt_samples import COMMIT, layer_row, make_receipt
from trellis_kernels.layers import DeviceLimits
from trellis_moe.bench import suite
from trellis_moe.bench.presets import TINY
from trellis_moe.bench.suite import LayerRun, Suite
from trellis_moe.cli import main
from trellis_moe.commands import bench as module
from trellis_moe.receipts.schema import LayerCase, Receipt
from trellis_moe.receipts.store import load, write

SMALL = Suite(layers=(LayerRun(TINY, (1,), (3,)),))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal of a second, on sources that are taken to be of a commit."""
    monkeypatch.setattr(suite, "tiny_suite", lambda: SMALL)
    monkeypatch.setattr("trellis_moe.bench.machine._output", lambda *command: None)


def bench(folder: Path, *words: str, part: str = "layer") -> int:
    given = ["--commit", COMMIT, "--device", "cpu", "--samples", "5", "--out", str(folder)]
    return main(["bench", part, *given, *words])


def counts(path: Path) -> list[int]:
    return [row.case.tokens for row in load(path).rows if isinstance(row.case, LayerCase)]


def test_a_rehearsal_writes_a_receipt_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, part="all") == 0
    receipt = load(tmp_path / "all.json")
    assert (receipt.machine.kind, receipt.commit, receipt.dirty) == ("cpu", COMMIT, False)
    assert counts(tmp_path / "all.json") == [1, 3, 3, 3]
    assert receipt.skipped == ()
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{len(receipt.rows)} rows" in told.err


def test_the_command_is_told_without_paths(tmp_path: Path) -> None:
    assert bench(tmp_path, "--preset", "tiny", "--tokens", "1", "--dirty", "--asked", "--jobs", "2") == 0
    receipt = load(tmp_path / "layer.json")
    assert receipt.command == (
        "trellis-moe bench layer --out DIR --samples 5 --device cpu --asked --preset tiny --tokens 1"
    )  # fmt: skip
    assert str(tmp_path) not in (tmp_path / "layer.json").read_text()
    assert receipt.dirty


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    assert bench(tmp_path, "--without", "compare", "op", "prepare", part="all") == 0
    receipt = load(tmp_path / "all.json")
    assert receipt.command.endswith("--device cpu --without compare op prepare")
    assert counts(tmp_path / "all.json") == [1]
    assert all(isinstance(row.case, LayerCase) for row in receipt.rows)
    with pytest.raises(SystemExit):
        bench(tmp_path, "--without", "all", part="all")


def test_token_counts_can_be_chosen(tmp_path: Path) -> None:
    assert bench(tmp_path, "--tokens", "2", "1") == 0
    assert counts(tmp_path / "layer.json") == [2, 1]
    assert bench(tmp_path, "--tokens", "3", part="compare") == 0
    assert set(counts(tmp_path / "compare.json")) == {3}


def test_a_request_to_terminate_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminate(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(suite, "compare", terminate)
    before = signal.getsignal(signal.SIGTERM)
    assert bench(tmp_path, part="all") == 130
    assert signal.getsignal(signal.SIGTERM) == before
    assert counts(tmp_path / "all.json") == [1]
    assert [each.why for each in load(tmp_path / "all.json").skipped] == ["interrupted"]


def test_kernels_can_be_compiled_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[tuple[list[object], object]] = []
    monkeypatch.setattr(suite, "suite_keys", lambda suite, wanted, limits: [limits.arch, "two", limits.arch])
    monkeypatch.setattr("trellis_kernels.layers.device_limits", lambda device: DeviceLimits("sm_120a", 188))
    monkeypatch.setattr(suite.compiler, "precompile", lambda keys, jobs: given.append((list(keys), jobs)))
    assert bench(tmp_path, "--compile-only", "--jobs", "3") == 0
    assert bench(tmp_path, "--compile-only", "--arch", "sm_90a") == 0
    assert given == [(["sm_120a", "two"], 3), (["sm_90a", "two"], None)]
    assert "2 kernels are ready" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_kernels_of_every_part_of_the_gpus_suite_are_keys_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    given: list[Any] = []
    monkeypatch.setattr(suite.compiler, "precompile", lambda keys, jobs: given.extend(keys))
    words = ["--compile-only", "--arch", "sm_90a", "--preset", "qwen3-30b-a3b:mul1:3", "--tokens", "8", "1024"]
    assert bench(tmp_path, *words, part="all") == 0
    assert {key.arch for key in given} == {"sm_90a"}
    assert {"decode", "ceiling", "rotate", "pack_routes", "reduce_routes"} <= {key.kernel for key in given}
    assert {key.arithmetic for key in given if key.kernel == "moe_small"} == {"exact", "unrounded", "bytes"}


def test_what_was_measured_before_a_process_is_killed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[list[int], list[str]]] = []

    def look(*_: object, **__: object) -> None:
        receipt = load(tmp_path / "all.json")
        kept.append((counts(tmp_path / "all.json"), [each.what for each in receipt.skipped]))

    monkeypatch.setattr(suite, "tiny_suite", lambda: replace(SMALL, groups=("rotate",), sizes_on_cpu=True))
    monkeypatch.setattr(suite, "measure_ops", look)
    assert bench(tmp_path, part="all") == 0
    assert kept == [([1, 3, 3, 3], ["the rest"])]
    assert load(tmp_path / "all.json").skipped == ()


def test_layers_can_be_chosen(tmp_path: Path) -> None:
    assert bench(tmp_path, "--preset", "tiny:mcg:4", "--tokens", "1") == 0
    (row,) = load(tmp_path / "layer.json").rows
    assert isinstance(row.case, LayerCase)
    assert (row.case.codebook, row.case.k) == ("mcg", "4")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--commit", "main"), "hexadecimal"),
        (("--samples", "4"), "--samples must be 5 to 64, got 4"),
        (("--preset", "gpt"), "no layer that is known"),
        (("--jobs", "0"), "--jobs must be at least 1, got 0"),
        (("--arch", "sm_90a"), "--arch sm_90a goes with --compile-only"),
        (("--tokens", "0"), "--tokens must be at least 1, got 0"),
        (("--seconds", "-1"), "nothing was measured"),
    ],
    ids=str,
)
def test_refusals_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], match: str
) -> None:
    assert bench(tmp_path, *words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("trellis-moe: error: ")
    assert match in last
    assert list(tmp_path.iterdir()) == []


def test_without_a_commit_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "--commit" in capsys.readouterr().err


def test_a_gpu_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "layer", "--out", str(tmp_path), "--commit", COMMIT]) == 2
    assert "--device cuda" in capsys.readouterr().err


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one page, and a receipt beside it."""
    page = tmp_path / "docs/benchmarks/README.md"
    page.parent.mkdir(parents=True)
    page.write_text("<!-- receipts measured: begin -->\n<!-- receipts measured: end -->\n")
    (tmp_path / "README.md").write_text("a page\n")
    write(make_receipt([layer_row(tokens, 150_000) for tokens in (8, 32, 64)]), tmp_path / "made" / "all.json")
    return tmp_path


def test_receipts_are_published_and_tables_and_plots_made(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(repository)]
    assert main(["bench", "publish", *root, str(repository / "made/all.json")]) == 0
    assert main(["bench", "tables", "--check", *root]) == 1
    assert main(["bench", "tables", *root]) == 0
    assert main(["bench", "tables", "--check", *root]) == 0
    assert "0.150" in (repository / "docs/benchmarks/README.md").read_text()
    pytest.importorskip("matplotlib", reason="plots need trellis-moe[bench]")
    assert main(["bench", "plot", *root]) == 0
    assert str(repository / "docs/benchmarks/nvidia-h200/layers.svg") in capsys.readouterr().out


def test_a_rehearsal_is_not_published(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(repository / "made") == 0
    path = repository / "made/layer.json"
    assert main(["bench", "publish", "--root", str(repository), str(path)]) == 2
    assert "rehearsal on a CPU" in capsys.readouterr().err


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == Receipt.json_schema()


@pytest.mark.parametrize("part", module._MEASURING)
def test_every_part_explains_itself(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", part, "--help"])
    assert caught.value.code == 0
    shown: Any = capsys.readouterr().out
    assert "--commit" in shown
    assert ("--preset" in shown) == (part in ("layer", "compare", "all"))
