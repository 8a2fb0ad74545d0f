"""Owns the results of attacks: rows of a JSON document, and the page that is made of them.

It must not know how an attack works.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["DOCUMENT", "PAGE", "SCHEMA", "Row", "load_rows", "render_page", "save_rows"]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/reliability.json"
"""The results of the last long run."""
PAGE = ROOT / "docs/reliability.md"
"""What is made of them."""
SCHEMA = "trellis/reliability/1"

_HEAD = """# Reliability

What was done to trellis on purpose, how often, and what came of it. Checkpoints come from strangers, and machines fail:
each attack must end in an error of the packages' own or in the right result, in bounded time and memory, with nothing
left behind. This page is made of `docs/reliability.json` by `python -m attacks page`; the numbers are those of the last
long run, and every row can be run again: `nox -s attacks` runs all of them, or the command of a row runs it alone
(`PYTHONPATH=tests`, from the root of the repository). Rows "on a GPU" are of a machine that has one, by
`python -m attacks faults CLASS --gpu --into FILE`, and come here by `python -m attacks merge FILE`.

"""
_TAIL = """
`silent` counts wrong results without an error, foreign exceptions, hangs, and things left behind; none is acceptable.

## Error budget

The relative L2 of each token from float64 on the exact codes is at most

    b c                                  where one op runs after the other, and so on a CPU
    max(b, e + (b c + s / r) / 4)        on the fused paths of a GPU

- b is 1e-3, with bfloat16 inputs 4e-3.
- c is 1, but where the law between the GEMMs makes more than 4 times as much of a relative error in gate and up, it is
  that factor: a limit hides the size of its argument and keeps the argument's error. `silu` limited to 0.75 reaches 200
  on inputs of 65504, unlimited laws stay below 4. Op by op, rows go to float16 by powers of two of their own.
- e is what three roundings lose where all else is float64: rotated inputs, the rotated activation and outputs of routes
  go to the nearest float16, subnormals too. Where operands lie next to a limit or have few steps, e may be above b. For
  nine such tokens it is what an H200 was measured to lose, to four parts in a thousand: float32 sums, their order and
  decoded weights add nothing that shows.
- The last term is for values so near a tie that a float32 sum takes them to its other side: one of 256, 4 times the
  size of its row, moves by 2^-10 of itself, which is 2.4e-4 of the row, and the law makes it c times as much. s is
  3e-8, half of float16's smallest step, and r the smallest root mean square of what is rounded. Where s / r is above 4,
  nothing is left of a token, and the budget says nothing of it.
- A token whose operands leave float16 (65504) on a fused path may be not finite, and nothing else; other tokens keep
  their bits. Finite and outside the budget is silent, and fails.
- A row of zeros gives zeros, bit for bit, where linears have no bias.

`tests/integration/test_numeric_stress.py` computes c, e and r for each token in float64 and holds every token to this.

## Not covered

- A CUDA graph that is replayed after its binding is gone, or on several streams at once: a graph holds addresses alone,
  and nobody is asked at a replay. A binding keeps its weights and scratch; runs outside of graphs follow each other.
- `compute-sanitizer` is not among these rows: what it ran and found is in the page on qualification.
- Kernels on mutated codes: any bits are legal codes, so nothing can be mutated there; routes and shapes are checked
  before a launch.
- A host that loses power: files are synchronised before they get their names, which a killed process cannot show.
- A storage that lies about what it wrote: a container's digest and the cache's find it, an EXL3 checkpoint has none.
"""


@dataclass(frozen=True)
class Row:
    """One class of attack.

    Attributes:
        attack: what was done.
        seed: of the first case; case i has seed + i.
        outcomes: how often each outcome came.
        seconds: wall time.
        command: what runs it again.
        machine: where it ran.
        silent: descriptions of cases that ended in no acceptable way, at most ten.
    """

    attack: str
    seed: int
    outcomes: dict[str, int]
    seconds: float
    command: str
    machine: str = field(default_factory=lambda: f"{platform.machine()}, Python {platform.python_version()}")
    silent: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Cases in all."""
        return sum(self.outcomes.values())

    @classmethod
    def of(cls, attack: str, seed: int, outcomes: Counter[str], seconds: float, command: str, silent: list[str]) -> Row:
        """A row of counted outcomes; what was silent is one of them."""
        counted = dict(sorted((outcomes + Counter({"silent": len(silent)})).items()))
        return cls(attack, seed, counted, round(seconds, 1), command, silent=silent[:10])


def load_rows(path: Path = DOCUMENT) -> list[Row]:
    """The rows of a document; none where there is no document."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    assert content["schema"] == SCHEMA, content["schema"]
    return [Row(**row) for row in content["rows"]]


def save_rows(rows: list[Row], path: Path = DOCUMENT) -> None:
    """Write rows, each in the place of the one of its attack and command where there is one."""
    known = {(row.attack, row.command): row for row in load_rows(path)}
    known |= {(row.attack, row.command): row for row in rows}
    ordered = [asdict(row) for _, row in sorted(known.items())]
    path.write_text(json.dumps({"schema": SCHEMA, "rows": ordered}, indent=1) + "\n")


def render_page(rows: list[Row]) -> str:
    """The page as text."""
    lines = ["| attack | tried | outcome | seconds | command |", "|---|---|---|---|---|"]
    for row in rows:
        outcome = ", ".join(f"{count} {name}" for name, count in row.outcomes.items()) or "none"
        if "silent" not in row.outcomes:
            outcome += ", 0 silent"
        lines.append(f"| {row.attack} | {row.tried} | {outcome} | {row.seconds:g} | `{row.command}` |")
    machines = sorted({row.machine for row in rows})
    return _HEAD + "\n".join(lines) + "\n\nRun on: " + "; ".join(machines) + ".\n" + _TAIL
