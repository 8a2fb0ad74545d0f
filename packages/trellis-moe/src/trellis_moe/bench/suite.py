"""Owns which measurements a run takes, and in what order, so that what matters most is there when the time is over.

It must not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from trellis_kernels.bench.op_cases import GROUPS
from trellis_kernels.bench.op_cases import keys as op_case_keys
from trellis_kernels.bench.ops import CEILING_CODEBOOKS
from trellis_kernels.cute import compiler
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.layers import device_limits
from trellis_moe.bench.ceilings import ceiling_keys, measure_copy, measure_decode, measure_gemm
from trellis_moe.bench.contenders import GroupedLayer, compare, compare_cpu, contender_keys
from trellis_moe.bench.layers import LayerBench, plan_layer
from trellis_moe.bench.ops import GPU_SIZES, TINY_SIZES, measure_ops
from trellis_moe.bench.prepare import (
    FURTHER_PREPARATIONS,
    GPU_PREPARATIONS,
    TINY_PREPARATIONS,
    Preparation,
    measure_layer_preparations,
)
from trellis_moe.bench.presets import PRESETS, TINY, Preset
from trellis_moe.bench.record import Recorder
from trellis_moe.errors import MoeError

__all__ = ["PARTS", "LayerRun", "Suite", "asked_suite", "full_suite", "precompile", "run", "tiny_suite"]

PARTS = ("ceiling", "layer", "compare", "op", "prepare")
"""What a suite is made of."""
_KIMI_BOUND = (320 << 20) - 1  # bytes of scratch; below 320 MiB is asked for
_EAGER_COUNTS = (1, 8)  # tokens of the launches that are also timed from Python, which costs the same for others
_RATES = (*(str(k) for k in range(1, 9)), "1.5", "2.5", "3.5")


@dataclass(frozen=True)
class LayerRun:
    """One layer at some token counts.

    Attributes:
        preset: which.
        tokens: counts that are measured alone, in a graph and from Python.
        compared: counts that are measured in turns with other contenders.
        in_bytes: counts that are also measured with the arithmetic `bytes`.
        io_dtype: of x and y.
        scratch_bound: most bytes of scratch, or None.
    """

    preset: Preset
    tokens: tuple[int, ...] = ()
    compared: tuple[int, ...] = ()
    in_bytes: tuple[int, ...] = ()
    io_dtype: str = "float16"
    scratch_bound: int | None = None


@dataclass(frozen=True)
class Suite:
    """What a run measures, in this order.

    Attributes:
        decoded: (codebook, K) whose decode rate is a ceiling of the layers.
        layers: whole layers.
        groups: of ops.
        sizes_on_cpu: whether ops are as small as a CPU likes.
        preparations: ways to the device.
        further: (codebook, K) of the other decode rates.
        on_cpu: layers that the torch backend runs on the host, with their tokens.
    """

    decoded: tuple[tuple[str, str], ...] = ()
    layers: tuple[LayerRun, ...] = ()
    groups: tuple[str, ...] = ()
    sizes_on_cpu: bool = False
    preparations: tuple[Preparation, ...] = ()
    further: tuple[tuple[str, str], ...] = ()
    on_cpu: tuple[tuple[Preset, int], ...] = ()


def asked_suite() -> Suite:
    """Every figure that was asked for, and no more: about two minutes of measuring behind the compiler."""
    glm, qwen, qwen4 = PRESETS["glm-4.5-air:mul1:3"], PRESETS["qwen3-30b-a3b:mul1:3"], PRESETS["qwen3-30b-a3b:mcg:4"]
    layers = (
        LayerRun(glm, (1, 8, 16, 32), (128, 512, 1024, 4096, 8192, 16384), (1, 8, 16, 32)),
        LayerRun(qwen, (1, 8, 32), (128, 512, 1024, 4096, 8192), (1, 8, 32)),
        LayerRun(qwen4, (1, 8, 32, 128, 1024, 8192)),
        LayerRun(PRESETS["deepseek-v3-tp8:mcg:3"], (1, 8, 32), (128, 1024, 8192)),
        LayerRun(PRESETS["kimi-k3-tp9:mcg:2"], (4096,), scratch_bound=_KIMI_BOUND),
    )
    first = tuple((book, k) for k in ("3", "4", "2") for book in CEILING_CODEBOOKS)
    further = tuple((book, k) for book in CEILING_CODEBOOKS for k in _RATES if (book, k) not in first)
    return Suite(first, layers, tuple(GROUPS), False, GPU_PREPARATIONS, further)


def full_suite() -> Suite:
    """What the tables of the documentation need: every figure that was asked for, then what surrounds it."""
    asked, qwen = asked_suite(), PRESETS["qwen3-30b-a3b:mul1:3"]
    around = (
        LayerRun(PRESETS["glm-4.5-air:mul1:3"], (2, 4, 64, 256, 2048), (), (2, 4)),
        LayerRun(qwen, (2, 4, 16, 64, 256, 2048, 16384), (), (2, 4, 16)),
        LayerRun(PRESETS["kimi-k3-tp9:mcg:2"], (1, 8, 64)),
        LayerRun(PRESETS["qwen3-30b-a3b:mul1:2"], (1, 8, 32, 1024), (), (1, 8, 32)),
        LayerRun(PRESETS["mixtral-8x7b:mul1:3"], (1, 8), (1024,), (1, 8)),
        LayerRun(PRESETS["deepseek-v3:mcg:3"], (1, 8, 32), (1024,)),
        LayerRun(qwen, (8, 1024), io_dtype="bfloat16"),
    )
    preparations = (*asked.preparations, *FURTHER_PREPARATIONS)
    return replace(asked, layers=(*asked.layers, *around), preparations=preparations, on_cpu=((qwen, 1),))


def tiny_suite() -> Suite:
    """The same code on a layer that a CPU runs in milliseconds: a rehearsal, whose receipt no table takes."""
    return Suite(
        layers=(LayerRun(TINY, (1, 5), (9,)),),
        groups=tuple(GROUPS),
        sizes_on_cpu=True,
        preparations=TINY_PREPARATIONS,
        on_cpu=((TINY, 2),),
    )


def run(recorder: Recorder, suite: Suite, parts: Iterable[str] = PARTS, *, jobs: int | None = None) -> None:
    """Measure the parts of a suite; copying and multiplying come first, since ratios need them.

    Args:
        recorder: takes ceilings and rows, and says when the time is over.
        suite: what.
        parts: which of `PARTS`.
        jobs: processes that compile, None for one on each CPU.
    """
    wanted = frozenset(parts)
    if recorder.device.type == "cuda":
        recorder.attempt("compile kernels", lambda: precompile(recorder, suite, wanted, jobs=jobs))
    recorder.attempt("device copy", lambda: measure_copy(recorder))
    recorder.attempt("bf16 GEMM", lambda: measure_gemm(recorder))
    for book, k in suite.decoded:
        recorder.attempt(f"decode {book} K={k}", partial(measure_decode, recorder, book, k))
    for layer in suite.layers if wanted & {"layer", "compare"} else ():
        _measure_layer(recorder, layer, wanted)
    sizes = TINY_SIZES if suite.sizes_on_cpu else GPU_SIZES
    for group in suite.groups if "op" in wanted else ():
        recorder.attempt(f"ops: {group}", partial(measure_ops, recorder, group, sizes))
    for preparation in suite.preparations if "prepare" in wanted else ():
        recorder.attempt(
            f"prepare {preparation.name}",
            partial(measure_layer_preparations, recorder, preparation),
        )
    for book, k in suite.further if "ceiling" in wanted else ():
        recorder.attempt(f"decode {book} K={k}", partial(measure_decode, recorder, book, k))
    for preset, tokens in suite.on_cpu if "compare" in wanted else ():
        recorder.attempt(f"{preset.key} on the CPU", partial(compare_cpu, recorder, preset, tokens))


def _measure_layer(recorder: Recorder, layer: LayerRun, wanted: frozenset[str]) -> None:
    bench: LayerBench | None = None

    def made() -> LayerBench:
        nonlocal bench
        bench = LayerBench(layer.preset, recorder.device) if bench is None else bench
        return bench

    def take(tokens: int, arithmetic: str) -> Callable[[], None]:
        return lambda: made().measure(
            recorder,
            tokens,
            arithmetic=arithmetic,
            io_dtype=layer.io_dtype,
            scratch_bound=layer.scratch_bound,
            eager=tokens in _EAGER_COUNTS,
        )

    name = f"{layer.preset.key} {layer.io_dtype}"
    if "layer" in wanted:
        for tokens in layer.in_bytes:
            recorder.attempt(f"{name}, {tokens} tokens, bytes", take(tokens, "bytes"))
        for tokens in layer.tokens:
            recorder.attempt(f"{name}, {tokens} tokens", take(tokens, "exact"))
    if "compare" in wanted and layer.compared:
        decoded: list[GroupedLayer] = []
        recorder.attempt(f"{name}, decoded to bf16", lambda: decoded.append(GroupedLayer(made().layers[0])))
        for tokens in layer.compared if decoded else ():
            recorder.attempt(
                f"{name}, {tokens} tokens, compared",
                partial(compare, recorder, made(), tokens, decoded=decoded[0]),
            )


def precompile(recorder: Recorder, suite: Suite, wanted: frozenset[str], *, jobs: int | None = None) -> None:
    """Compile in processes what the suite launches, so that no measurement waits for a compiler.

    Args:
        recorder: says what was compiled.
        suite: what will be measured.
        wanted: which of `PARTS`.
        jobs: processes that compile, None for one on each CPU.
    """
    limits = device_limits(recorder.device)
    keys = [] if limits is None else suite_keys(suite, wanted, limits.arch, recorder.device)
    compiler.precompile(dict.fromkeys(keys), jobs=jobs)
    recorder.tell(f"    {len(set(keys))} kernels are ready")


def suite_keys(suite: Suite, wanted: frozenset[str], arch: str, device: torch.device) -> list[KernelKey]:
    """Every kernel that a suite launches; a layer whose plan is refused has none, and fails where it is measured."""
    keys: list[KernelKey] = []
    for layer in suite.layers if wanted & {"layer", "compare"} else ():
        counts = [(tokens, "exact") for tokens in (*layer.tokens, *layer.compared)]
        for tokens, arithmetic in [*counts, *((tokens, "bytes") for tokens in layer.in_bytes)]:
            keys += _plan_keys(layer, tokens, arithmetic, device)
        if "compare" in wanted and layer.compared:
            keys += contender_keys(layer.preset, arch)
    for group in suite.groups if "op" in wanted else ():
        keys += op_case_keys(group, GPU_SIZES, arch)
    further = suite.further if "ceiling" in wanted else ()
    return [*keys, *ceiling_keys([*suite.decoded, *further], arch)]


def _plan_keys(layer: LayerRun, tokens: int, arithmetic: str, device: torch.device) -> Sequence[KernelKey]:
    try:
        plan = plan_layer(
            layer.preset,
            tokens,
            device=device,
            arithmetic=arithmetic,
            io_dtype=layer.io_dtype,
            scratch_bound=layer.scratch_bound,
        )
    except MoeError:
        return ()
    return plan.compile_keys()
