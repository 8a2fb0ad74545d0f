"""Holds what a receipt says of its machine and commit to what was found out, never to a guess."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from receipt_samples import COMMIT, STATE
from trellis_moe.bench import machine as module
from trellis_moe.bench.machine import Commit, driver_version, find_commit, machine, read_states, utc_now, versions
from trellis_moe.errors import MoeValueError

CPU = torch.device("cpu")


def commit(folder: Path) -> str:
    """A repository with one commit of `packages/code.py`, and its name."""
    (folder / "packages").mkdir()
    (folder / "packages/code.py").write_text("1\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def test_git_says_the_commit_and_whether_sources_differ(tmp_path: Path) -> None:
    name = commit(tmp_path)
    packages = tmp_path / "packages"
    assert find_commit(None, root=packages) == Commit(name, False)
    assert find_commit(name[:8], root=packages) == Commit(name, False)
    assert find_commit(None, dirty=True, root=packages) == Commit(name, True)
    (packages / "code.py").write_text("2\n")
    assert find_commit(None, root=packages) == Commit(name, True)


def test_a_commit_that_git_denies_is_refused(tmp_path: Path) -> None:
    name = commit(tmp_path)
    with pytest.raises(MoeValueError, match=f"git says is {name}"):
        find_commit(COMMIT, root=tmp_path / "packages")


def test_without_git_the_commit_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(MoeValueError, match="--commit"):
        find_commit(None, root=tmp_path)
    assert find_commit(COMMIT, root=tmp_path) == Commit(COMMIT, False)
    assert find_commit(COMMIT, dirty=True, root=tmp_path) == Commit(COMMIT, True)


def test_a_checkout_of_something_else_says_nothing(tmp_path: Path) -> None:
    commit(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/installed.py").write_text("")
    with pytest.raises(MoeValueError, match="--commit"):
        find_commit(None, root=tmp_path / "site")


@pytest.mark.parametrize("name", ["main", "ABCDEF0", "123456", "0" * 41])
def test_what_is_no_commit_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(MoeValueError, match="hexadecimal"):
        find_commit(name, root=tmp_path)


GPU = torch.device("cuda")


def smi(monkeypatch: pytest.MonkeyPatch, text: str | None) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(module, "_uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(module, "_bus", lambda index: f"bus {index}")
    monkeypatch.setattr(module, "_output", lambda *command: asked.append(command) or text)
    return asked


def test_states_are_those_of_the_gpus_that_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = smi(monkeypatch, "1980, 3201, 120.50, 41\n345, 3201, 75.00, 30")
    assert read_states(GPU, 2)[0] == STATE
    assert read_states(GPU, 2)[1].sm_clock_mhz == 345
    with pytest.raises(MoeValueError, match="state of 2 GPUs, a receipt needs 3"):
        read_states(torch.device("cuda", 1), 3)
    assert [command[1] for command in asked] == [
        *["--id=GPU-0,GPU-1"] * 2, "--id=GPU-1,GPU-2,GPU-3", "--id=bus 1,bus 2,bus 3",
    ]  # fmt: skip


def test_gpus_are_named_as_nvidia_smi_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(uuid="12345678-90ab", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: found)
    assert (module._uuid(0), module._bus(0)) == ("GPU-12345678-90ab", "00000000:1b:02.0")


@pytest.mark.parametrize("text", [None, "", "[N/A], 3201, 120.5, 41"])
def test_a_state_that_is_not_told_is_refused(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    smi(monkeypatch, text)
    with pytest.raises(MoeValueError, match="receipt needs"):
        read_states(GPU)


def test_the_driver_is_told_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, "580.65.06\n580.65.06")
    assert driver_version() == "580.65.06"
    smi(monkeypatch, None)
    assert driver_version() is None


def test_a_command_that_is_not_there_tells_nothing() -> None:
    assert module._output("no-such-command-anywhere") is None


def test_a_cpu_has_no_driver_and_no_states() -> None:
    found = machine(CPU, ())
    assert (found.kind, found.driver, found.start, found.end) == ("cpu", None, (), ())
    assert versions().torch == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", utc_now())


@pytest.mark.gpu
def test_gpu_states_and_driver_are_read() -> None:
    found = machine(torch.device("cuda"), read_states(torch.device("cuda")))
    assert found.name == torch.cuda.get_device_name()
    assert found.driver
    assert found.start[0].temperature_celsius > 0
