"""Owns the table of what is supported, made from the registries.  It must not list anything that a registry does not.

python -m trellis_moe.support      prints the table that the README shows between its support-table marks
"""

from __future__ import annotations

from collections.abc import Sequence

from trellis_format.codebooks import CODEBOOKS, EXL3_CODEBOOKS
from trellis_format.codebooks.mul1 import Mul1
from trellis_format.container.manifest import CONTAINER_BITS
from trellis_format.rates import Rate
from trellis_format.source import TrellisSource
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.prefill_key import GEMM_ARCH
from trellis_kernels.layers import fuses
from trellis_moe.errors import MoeUnsupportedError
from trellis_moe.specs import ActivationSpec

__all__ = ["TESTED_ON", "check_support", "support_row", "support_table"]

TESTED_ON = {"sm_90a": "NVIDIA H200"}
"""GPU on which the kernels of a compile target were run; the other targets are compiled and no more."""


_HEADER = ("codebook", "K", "containers", "CPU", "GPU: decode", "GPU: few tokens", "GPU: many tokens")


def support_table() -> str:
    """The table as Markdown: a row for each codebook, then what the compile targets were tested on."""
    rows = [_HEADER, tuple("---" for _ in _HEADER), *(_cells(name) for name in CODEBOOKS)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    targets = "; ".join(f"`{arch}` {_tested(arch)}" for arch in ARCHS)
    return "\n".join([*lines, "", f"Compile targets: {targets}."])


def support_row(codebook: str) -> str:
    """A codebook's row in one line, each cell behind its heading."""
    return ", ".join(f"{heading} {cell}" for heading, cell in zip(_HEADER, _cells(codebook), strict=True))


def check_support(source: TrellisSource, activation: ActivationSpec) -> None:
    """Accept a layer that a path takes.

    Raises:
        MoeUnsupportedError: if none does; states the rule, and shows the codebook's row of the table.
    """
    if activation.arithmetic != "bytes" or source.codebook == Mul1.name:
        return
    fact = f"arithmetic bytes needs codebook {Mul1.name}, got {source.codebook}; exact is legal for every codebook"
    raise MoeUnsupportedError(f"{fact} ({support_row(source.codebook)})")


def _cells(name: str) -> tuple[str, ...]:
    holds = {"EXL3": name in EXL3_CODEBOOKS, "native": True, "exl3-v1": name in CONTAINER_BITS}
    containers = ", ".join(container for container, held in holds.items() if held)
    few, many = ("every target", GEMM_ARCH) if fuses(name) else ("-", "-")
    return f"`{name}`", rates_text(CODEBOOKS[name].legal_rates), containers, "yes", "every target", few, many


def rates_text(rates: Sequence[Rate]) -> str:
    """Rates as ranges of whole K, then the half rates."""
    whole = [rate.half_bits // 2 for rate in rates if not rate.is_half]
    text = f"{whole[0]} to {whole[-1]}" if whole == list(range(whole[0], whole[-1] + 1)) else ", ".join(map(str, whole))
    return ", ".join([text, *(str(rate) for rate in rates if rate.is_half)])


def _tested(arch: str) -> str:
    return f"tested on {TESTED_ON[arch]}" if arch in TESTED_ON else "compiled"


if __name__ == "__main__":
    print(support_table())
