"""Owns the table of what is supported, made from the registries.  It must not list anything that a registry does not.

python -m trellis_moe.support      prints the table that the README shows between its support-table marks
"""

from __future__ import annotations

from collections.abc import Sequence

from trellis_format.codebooks import CODEBOOKS, EXL3_CODEBOOKS
from trellis_format.container.manifest import CONTAINER_BITS
from trellis_format.rates import Rate
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.prefill_key import GEMM_ARCH
from trellis_kernels.layers import fuses

__all__ = ["TESTED_ON", "support_table"]

TESTED_ON = {"sm_90a": "NVIDIA H200"}
"""GPU on which the kernels of a compile target were run; the other targets are compiled and no more."""


def support_table() -> str:
    """The table as Markdown: a row for each codebook, then what the compile targets were tested on."""
    header = ("codebook", "K", "containers", "CPU", "GPU: decode", "GPU: few tokens", "GPU: many tokens")
    rows = [header, tuple("---" for _ in header)]
    for name, codebook in CODEBOOKS.items():
        holds = {"EXL3": name in EXL3_CODEBOOKS, "native": True, "exl3-v1": name in CONTAINER_BITS}
        containers = ", ".join(container for container, held in holds.items() if held)
        few = "every target" if fuses(name) else "-"
        many = GEMM_ARCH if fuses(name) else "-"
        rows.append((f"`{name}`", rates_text(codebook.legal_rates), containers, "yes", "every target", few, many))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    targets = "; ".join(f"`{arch}` {_tested(arch)}" for arch in ARCHS)
    return "\n".join([*lines, "", f"Compile targets: {targets}."])


def rates_text(rates: Sequence[Rate]) -> str:
    """Rates as ranges of whole K, then the half rates."""
    whole = [rate.half_bits // 2 for rate in rates if not rate.is_half]
    text = f"{whole[0]} to {whole[-1]}" if whole == list(range(whole[0], whole[-1] + 1)) else ", ".join(map(str, whole))
    return ", ".join([text, *(str(rate) for rate in rates if rate.is_half)])


def _tested(arch: str) -> str:
    return f"tested on {TESTED_ON[arch]}" if arch in TESTED_ON else "compiled"


if __name__ == "__main__":
    print(support_table())
