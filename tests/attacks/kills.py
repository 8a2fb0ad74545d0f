"""Owns loops that kill a process at random points of converting, caching and preparing, and look at what is left.

It must not know how any of these work: after each kill the next run must succeed, give the same bytes, and find and
leave nothing of the killed one.  Processes are forked, since loading torch takes longer than what is killed.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from attacks.record import Row
from prep.samples import Layer, open_layer, random_layer, write_checkpoint
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.files.header import read_header
from trellis_prep import PreparedCache, TrellisStaging, prepare

__all__ = ["VICTIMS", "Victim", "kill_loop"]

_TRIES = 10
"""Runs for each wanted kill before a loop ends with fewer."""
_PATIENCE = 60.0
"""Seconds after which a run that was not killed counts as hung."""


@dataclass(frozen=True)
class Victim:
    """Something that is killed while it runs.

    Attributes:
        name: of the attack.
        run: does it, in a folder.
        digest: what it left in the folder, in words; it must be the same after every run that was not killed.
        strays: files in the folder that must not be there after one.
        reset: takes the result away, so that the next run does all of it.
    """

    name: str
    run: Callable[[Path], None]
    digest: Callable[[Path], str]
    strays: Callable[[Path], list[str]]
    reset: Callable[[Path], None]


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _sources(folder: Path) -> list[Path]:
    return sorted((folder / "model").iterdir())


def _convert(folder: Path) -> None:
    out = folder / "out"
    if out.is_dir() and not any(path.name.startswith(".") for path in out.iterdir()):
        return  # it was complete when the signal came
    with closing(open_source(folder / "model")) as source:
        convert(source, out, "native")


def _reset_convert(folder: Path) -> None:
    for path in (folder / "out").iterdir():
        path.unlink()
    (folder / "out").rmdir()


def _layer(folder: Path) -> Layer:
    _, source, weights = open_layer(folder / "model")
    return source, weights


def _cache(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a damaged or unwritable entry is a failure here
        PreparedCache(folder / "cache").prepare(*_layer(folder), staging=TrellisStaging(max_bytes=400_000, readers=2))


def _cache_digest(folder: Path) -> str:
    (entry,) = [path for path in (folder / "cache").iterdir() if path.suffix == ".safetensors"]
    read_header(entry)
    return hashlib.sha256(entry.read_bytes()).hexdigest()


def _reset_cache(folder: Path) -> None:
    for path in (folder / "cache").glob("*.safetensors"):
        path.unlink()


def _prepare(folder: Path) -> None:
    prepared = prepare(*_layer(folder), staging=TrellisStaging(max_bytes=400_000, readers=2), poison=True)
    (folder / "digest").write_text(hashlib.sha256(prepared.codes.numpy().tobytes()).hexdigest())


VICTIMS = {
    "convert": Victim(
        "a process killed while it converts",
        _convert,
        lambda folder: _digest(list((folder / "out").iterdir())),
        lambda folder: (
            [path.name for path in folder.iterdir() if path.name not in ("model", "out")]
            + [path.name for path in (folder / "out").iterdir() if path.name.startswith(".")]
        ),
        _reset_convert,
    ),
    "cache": Victim(
        "a process killed while it prepares and writes a cache entry",
        _cache,
        _cache_digest,
        lambda folder: [path.name for path in (folder / "cache").iterdir() if path.suffix != ".safetensors"],
        _reset_cache,
    ),
    "prepare": Victim(
        "a process killed while it prepares",
        _prepare,
        lambda folder: (folder / "digest").read_text(),
        lambda folder: [path.name for path in folder.iterdir() if path.name not in ("model", "digest")],
        lambda folder: (folder / "digest").unlink(),
    ),
}
"""What is killed, by the word on the command line."""


def kill_loop(word: str, folder: Path, *, kills: int, seed: int) -> Row:
    """Kill a victim again and again, and run it once after each kill.

    Args:
        word: a key of `VICTIMS`.
        folder: an empty one.
        kills: how many runs to kill; one that ended before its signal is not one of them.
        seed: of the moments and of the signal, SIGKILL or SIGINT.
    """
    victim, begin = VICTIMS[word], time.perf_counter()
    write_checkpoint(folder / "model", random_layer(experts=8, hidden=256, intermediate=384, biased=True))
    files = _digest(_sources(folder))
    _run_whole(victim, folder)
    expected, usual = victim.digest(folder), _usual_seconds(victim, folder)
    outcomes: Counter[str] = Counter()
    silent: list[str] = []
    landed = number = 0
    while landed < kills and number < _TRIES * kills:
        rng = random.Random(seed + number)
        victim.reset(folder)
        sent = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGINT))
        killed = _run_killed(victim, folder, rng.uniform(0.0, usual), sent)
        started = time.perf_counter()
        fault = _look(victim, folder, expected, files)
        if fault:
            silent.append(f"seed {seed + number}: {fault}")
        else:
            outcomes[f"{sent.name} and sound after" if killed else "ended before the signal"] += 1
        usual = 0.9 * usual + 0.1 * (time.perf_counter() - started)  # a machine may grow faster or slower meanwhile
        landed, number = landed + killed, number + 1
    command = f"python -m attacks kill {word} --count {kills} --seed {seed}"
    return Row.of(victim.name, seed, outcomes, time.perf_counter() - begin, command, silent)


def _usual_seconds(victim: Victim, folder: Path) -> float:
    times = []
    for _ in range(3):
        victim.reset(folder)
        begin = time.perf_counter()
        _run_whole(victim, folder)
        times.append(time.perf_counter() - begin)
    return sorted(times)[1]


def _look(victim: Victim, folder: Path, expected: str, files: str) -> str | None:
    """What is wrong with the run after a kill; None if nothing is."""
    try:
        _run_whole(victim, folder)
        if victim.digest(folder) != expected:
            return "the result differs"
        if strays := victim.strays(folder):
            return f"left behind: {', '.join(strays)}"
        return None if _digest(_sources(folder)) == files else "the checkpoint changed"
    except (RuntimeError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _run_whole(victim: Victim, folder: Path) -> None:
    """Run in a process of its own; raises if that fails or hangs."""
    child = _fork(victim, folder)
    deadline = time.monotonic() + _PATIENCE
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise RuntimeError(f"still running after {_PATIENCE:g} s")
        time.sleep(0.002)
    if status:
        raise RuntimeError(
            f"failed with status {os.waitstatus_to_exitcode(status)}: {(folder.parent / 'why').read_text()}"
        )


def _run_killed(victim: Victim, folder: Path, seconds: float, sent: signal.Signals) -> bool:
    """Run, and send a signal after a time; whether it came before the end."""
    child = _fork(victim, folder)
    time.sleep(seconds)
    ended, _ = os.waitpid(child, os.WNOHANG)
    if ended:
        return False
    os.kill(child, sent)
    os.waitpid(child, 0)
    return True


def _fork(victim: Victim, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        victim.run(folder)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # noqa: BLE001  # told to the parent, which decides
        with suppress(OSError):
            (folder.parent / "why").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)
