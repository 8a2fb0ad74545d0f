"""Owns the command `python -m attacks`, which runs the attacks and keeps what came of them.

python -m attacks all --update          every attack at its full count, into docs/reliability.json and its page
python -m attacks kill convert          one loop of kills
python -m attacks faults misuse --gpu   one class of tests, those that need a GPU
python -m attacks merge FILE            rows that were kept elsewhere, into the document and its page
python -m attacks page                  make the page again
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from attacks.counted import FAULTS, run_tests
from attacks.hostile import FAMILIES, run_family
from attacks.kills import VICTIMS, kill_loop
from attacks.record import PAGE, Row, load_rows, render_page, save_rows

KILLS = 200
CASES = 1000
CASES_OF = {"mutants": 10_000, "extremes": 100}
"""Cases of the families that are cheaper or dearer than others."""
ADDRESS_SPACE = 16 << 30
"""Bytes that hostile checkpoints may make a process map; torch alone maps some."""


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments say; returns 1 if anything ended silently."""
    parser = argparse.ArgumentParser(prog="python -m attacks", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    kill = commands.add_parser("kill", help="kill a process at random points, over and over")
    kill.add_argument("victim", choices=sorted(VICTIMS))
    hostile = commands.add_parser("hostile", help="read, prepare and run what a stranger wrote")
    hostile.add_argument("family", choices=sorted(FAMILIES))
    faults = commands.add_parser("faults", help="inject faults: run the tests of a class, and count")
    faults.add_argument("tests", choices=sorted(FAULTS))
    faults.add_argument("--gpu", action="store_true", help="the tests that need a GPU, instead of all others")
    faults.add_argument("--jobs", type=int, default=1, help="processes, more than one with pytest-xdist")
    faults.add_argument("--into", type=Path, help="keep the row in this document")
    faults.add_argument("--update", action="store_true", help="keep the row in docs/reliability.json")
    for command, count in ((kill, KILLS), (hostile, CASES)):
        command.add_argument("--count", type=int, default=count)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--update", action="store_true", help="keep the row in docs/reliability.json")
    commands.add_parser("all", help="every attack at its full count").add_argument("--update", action="store_true")
    merge = commands.add_parser("merge", help="take rows of other documents into docs/reliability.json")
    merge.add_argument("documents", type=Path, nargs="+")
    commands.add_parser("page", help="make docs/reliability.md of docs/reliability.json")
    options = parser.parse_args(arguments)
    if getattr(options, "gpu", False) and not torch.cuda.is_available():
        parser.error("--gpu: no CUDA device is visible")
    torch.set_num_threads(1)
    if options.command in ("page", "merge"):
        rows = [row for path in getattr(options, "documents", ()) for row in load_rows(path)]
    else:
        rows = _run(options)
    if getattr(options, "into", None):
        save_rows(rows, options.into)
    if options.command in ("page", "merge") or options.update:
        save_rows(rows)
        PAGE.write_text(render_page(load_rows()))
    return 1 if any(row.silent for row in rows) else 0


def _run(options: argparse.Namespace) -> list[Row]:
    if options.command == "all":
        jobs = [("kill", word, KILLS, 0) for word in sorted(VICTIMS)]
        jobs += [("hostile", word, CASES_OF.get(word, CASES), 0) for word in FAMILIES]
        jobs += [("faults", word, 0, 0) for word in FAULTS]
    elif options.command == "faults":
        jobs = [("faults", options.tests, 0, 0)]
    else:
        word = options.victim if options.command == "kill" else options.family
        jobs = [(options.command, word, options.count, options.seed)]
    rows = []
    for kind, word, count, seed in jobs:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "work"
            work.mkdir()
            if kind == "faults":
                rows.append(run_tests(word, gpu=getattr(options, "gpu", False), jobs=getattr(options, "jobs", 1)))
            elif kind == "kill":
                rows.append(kill_loop(word, work, kills=count, seed=seed))
            else:
                rows.append(run_family(word, work, count=count, seed=seed, address_space=ADDRESS_SPACE))
        print(f"{rows[-1].attack}: {rows[-1].outcomes} in {rows[-1].seconds} s", flush=True)
        for line in rows[-1].silent:
            print(f"  {line}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
