"""Owns the measurement of instruction mixes: `python -m trellis_kernels.bench.pipes`.  It must not know any kernel."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from trellis_kernels.cute.mixes import MIXES, measure

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row of JSON for each mix: the cycles of a scheduler for one warp."""
    parser = argparse.ArgumentParser(prog="python -m trellis_kernels.bench.pipes", description=__doc__)
    parser.add_argument("mixes", nargs="*", metavar="MIX", help="names of mixes (default: all)")
    parser.add_argument("--warps", type=int, default=16, help="of a multiprocessor, a multiple of 4")
    options = parser.parse_args(arguments)
    for name in options.mixes or MIXES:
        print(json.dumps({"mix": name, "cycles": round(measure(MIXES[name], options.warps), 2)}), flush=True)


if __name__ == "__main__":
    main()
