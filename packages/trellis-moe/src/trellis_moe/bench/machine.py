"""Owns what a receipt says of the machine, the versions and the commit.  It must not measure.

Nothing is invented: what cannot be found out is asked for, and a receipt without it is refused.
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from trellis_format.version import version as trellis_version
from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.schema import DeviceState, Machine, Versions

__all__ = ["Commit", "driver_version", "find_commit", "machine", "read_states", "utc_now", "versions"]

_QUERY = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_SECONDS = 30.0  # that nvidia-smi and git may take


@dataclass(frozen=True)
class Commit:
    """What the sources are.

    Args:
        name: of the commit, hexadecimal.
        dirty: whether they differ from it.
    """

    name: str
    dirty: bool


def find_commit(given: str | None, *, dirty: bool = False, root: Path | None = None) -> Commit:
    """The commit of the sources: as given, else as git says.

    Args:
        given: its name; needed where the sources are no git checkout.
        dirty: whether the caller says that the sources differ from it.
        root: folder of the sources; None is that of this package.

    Raises:
        MoeValueError: if what is given is no commit, differs from what git says, or nothing says which commit it is.
    """
    if given is not None and not _COMMIT.fullmatch(given):
        raise MoeValueError(f"--commit must be 7 to 40 hexadecimal digits in lower case, got {given!r}")
    folder = root or Path(__file__).resolve().parents[1]
    head = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    tracked = _output("git", "-C", str(folder), "ls-files", "--", ".") if head else None
    if head is None or not tracked:  # no checkout, or one of something else around an installed package
        if given is None:
            raise MoeValueError("the sources are not in a git checkout; say with --commit which commit they are of")
        return Commit(given, dirty)
    if given is not None and not head.startswith(given):
        raise MoeValueError(
            f"--commit {given} is not the commit of the sources, which git says is {head}; where that checkout is of "
            "other sources, GIT_DIR=/dev/null hides it"
        )
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", "--", ":/packages")
    return Commit(head, dirty or changed != "")


def utc_now() -> str:
    """The time, as receipts state it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def versions() -> Versions:
    """What computes in this process."""
    try:
        dsl: str | None = version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        dsl = None
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        dsl=dsl,
        trellis=trellis_version(),
    )


def driver_version() -> str | None:
    """Version of the GPU's driver; None where nvidia-smi does not tell."""
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text else None


def read_states(device: torch.device, count: int = 1) -> tuple[DeviceState, ...]:
    """Clocks, power and temperature of GPUs now.

    Args:
        device: the first one, as this process numbers those that it sees.
        count: how many.

    Raises:
        MoeValueError: if nvidia-smi does not tell; a receipt needs them.
    """
    first, lines = device.index or 0, list[str]()
    for name in (_uuid, _bus):  # either may be hidden from a virtual machine
        ids = ",".join(name(index) for index in range(first, first + count))
        text = _output("nvidia-smi", f"--id={ids}", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
        lines = (text or "").splitlines()
        if len(lines) == count:
            return tuple(_parse_state(line) for line in lines)
    raise MoeValueError(f"nvidia-smi tells the state of {len(lines)} GPUs, a receipt needs {count}")


def _uuid(index: int) -> str:
    """What nvidia-smi, which numbers all GPUs of the machine, calls a GPU that this process sees."""
    return "GPU-" + str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")


def _bus(index: int) -> str:
    """Likewise, by the bus that it is on."""
    found: Any = torch.cuda.get_device_properties(index)  # torch types leave the bus out
    return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _parse_state(line: str) -> DeviceState:
    try:
        sm, memory, power, temperature = (float(part) for part in line.split(","))
    except ValueError as error:
        raise MoeValueError(f"nvidia-smi tells {line!r}; a receipt needs {', '.join(_QUERY)} as numbers") from error
    return DeviceState(
        sm_clock_mhz=int(sm), memory_clock_mhz=int(memory), power_watts=power, temperature_celsius=int(temperature)
    )


def machine(device: torch.device, start: tuple[DeviceState, ...], *, count: int = 1) -> Machine:
    """Where this process measures; reads the state at the end now.

    Args:
        device: of the measurements.
        start: from `read_states` before the first measurement; empty on a CPU.
        count: GPUs that took part.

    Raises:
        MoeValueError: if nvidia-smi does not tell.
    """
    if device.type != "cuda":
        return Machine(
            kind="cpu",
            name=platform.processor() or platform.machine() or "unknown processor",
            count=1,
            driver=None,
            multiprocessors=0,
            start=(),
            end=(),
        )
    properties = torch.cuda.get_device_properties(device)
    driver = driver_version()
    if driver is None:
        raise MoeValueError("nvidia-smi does not tell the version of the driver; a receipt needs it")
    return Machine(
        kind="cuda",
        name=properties.name,
        count=count,
        driver=driver,
        multiprocessors=properties.multi_processor_count,
        start=start,
        end=read_states(device, count),
    )


def _output(*command: str) -> str | None:
    """What a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
