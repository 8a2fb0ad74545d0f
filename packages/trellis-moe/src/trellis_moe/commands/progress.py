"""Owns the progress bar of the commands: silent for the first second, on stderr, only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trellis_moe.commands.layer import Progress as Tell

__all__ = ["progress_bar"]

_QUIET_SECONDS = 1.0


@contextmanager
def progress_bar(enabled: bool = True) -> Iterator[Tell]:
    """A callback of (stage, done, total) that shows a bar once work takes over a second.

    Args:
        enabled: False never shows one.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip
    wanted = enabled and sys.stderr is not None and sys.stderr.isatty()  # None where the process began without one
    begin, tasks, shown = time.monotonic(), dict[str, TaskID](), False

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal shown
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=max(total, 1))
        bar.update(tasks[stage], completed=done, total=max(total, 1))
        if wanted and not shown and time.monotonic() - begin > _QUIET_SECONDS:
            shown = True
            bar.start()

    try:
        yield tell
    finally:
        if shown:
            bar.stop()
