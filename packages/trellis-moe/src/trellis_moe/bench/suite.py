"""Owns which measurements a run takes, and in what order, so that what matters most is there when the time is over.

It must not know how anything is measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from trellis_kernels.bench.op_cases import GROUPS
from trellis_kernels.bench.op_cases import keys as op_case_keys
from trellis_kernels.bench.ops import CEILING_CODEBOOKS
from trellis_kernels.cute import compiler
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.layers import DeviceLimits, device_limits
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
        opt_in: arithmetic that a caller has to ask for, each with the counts that are also measured with it.
        io_dtype: of x and y.
        scratch_bound: most bytes of scratch, or None.
    """

    preset: Preset
    tokens: tuple[int, ...] = ()
    compared: tuple[int, ...] = ()
    opt_in: tuple[tuple[str, tuple[int, ...]], ...] = ()
    io_dtype: str = "float16"
    scratch_bound: int | None = None

    def runs(self) -> list[tuple[int, str]]:
        """(tokens, arithmetic) of what is measured alone, what is faster first."""
        opted = [(tokens, arithmetic) for arithmetic, counts in self.opt_in for tokens in counts]
        return [*opted, *((tokens, "exact") for tokens in self.tokens)]


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
        around: layers that nothing was asked of, and token counts between those that are asked for.
        further_preparations: likewise.
        on_cpu: layers that the torch backend runs on the host, with their tokens.
    """

    decoded: tuple[tuple[str, str], ...] = ()
    layers: tuple[LayerRun, ...] = ()
    groups: tuple[str, ...] = ()
    sizes_on_cpu: bool = False
    preparations: tuple[Preparation, ...] = ()
    further: tuple[tuple[str, str], ...] = ()
    around: tuple[LayerRun, ...] = ()
    further_preparations: tuple[Preparation, ...] = ()
    on_cpu: tuple[tuple[Preset, int], ...] = ()


def asked_suite() -> Suite:
    """Every figure that was asked for, and no more: about two minutes of measuring behind the compiler."""
    glm, qwen, qwen4 = PRESETS["glm-4.5-air:mul1:3"], PRESETS["qwen3-30b-a3b:mul1:3"], PRESETS["qwen3-30b-a3b:mcg:4"]
    dsv3, few = PRESETS["deepseek-v3-tp8:mcg:3"], (1, 8, 32, 128)
    layers = (
        LayerRun(
            glm, (1, 8, 16, 32), (128, 512, 1024, 4096, 8192, 16384),
            (("bytes", (1, 8, 16, 32)), ("unrounded", (1, 8, 16, 32, 128))),
        ),
        LayerRun(qwen, (1, 8, 32), (128, 512, 1024, 4096, 8192), (("bytes", (1, 8, 32)), ("unrounded", few))),
        LayerRun(qwen4, (*few, 1024, 8192), (), (("unrounded", few),)),
        LayerRun(dsv3, (1, 8, 32), (128, 1024, 8192), (("unrounded", few),)),
        LayerRun(PRESETS["kimi-k3-tp9:mcg:2"], (4096,), scratch_bound=_KIMI_BOUND),
    )  # fmt: skip
    first = tuple((book, k) for k in ("3", "4", "2") for book in CEILING_CODEBOOKS)
    further = tuple((book, k) for book in CEILING_CODEBOOKS for k in _RATES if (book, k) not in first)
    between = (LayerRun(glm, _between(2048)), LayerRun(qwen, (16, *_between(2048), 16384)))
    return Suite(first, layers, tuple(GROUPS), False, GPU_PREPARATIONS, further, between)


def _between(*more: int) -> tuple[int, ...]:
    """Token counts that, with those that are asked for, leave no room for a step down."""
    return (2, 4, 64, 256, *more)


def full_suite() -> Suite:
    """What the tables of the documentation need: every figure that was asked for, then what surrounds it."""
    asked, qwen = asked_suite(), PRESETS["qwen3-30b-a3b:mul1:3"]
    around = (
        LayerRun(PRESETS["qwen3-30b-a3b:mcg:4"], (16, *_between(512, 2048, 4096, 16384))),
        LayerRun(PRESETS["deepseek-v3-tp8:mcg:3"], (16, *_between(512, 2048, 4096, 16384))),
        LayerRun(PRESETS["kimi-k3-tp9:mcg:2"], (1, 8, 64, 1024)),
        LayerRun(PRESETS["qwen3-30b-a3b:mul1:2"], (1, 8, 32, 1024), (), (("bytes", (1, 8, 32)),)),
        LayerRun(PRESETS["mixtral-8x7b:mul1:3"], (1, 8), (1024,), (("bytes", (1, 8)),)),
        LayerRun(PRESETS["deepseek-v3:mcg:3"], (1, 8, 32), (1024,)),
        LayerRun(qwen, (8, 1024), io_dtype="bfloat16"),
    )
    return replace(
        asked, around=(*asked.around, *around), further_preparations=FURTHER_PREPARATIONS, on_cpu=((qwen, 1),)
    )


def tiny_suite() -> Suite:
    """The same code on a layer that a CPU runs in milliseconds: a rehearsal, whose receipt no table takes."""
    return Suite(
        layers=(LayerRun(TINY, (1, 5), (9,)),),
        groups=tuple(GROUPS),
        sizes_on_cpu=True,
        preparations=TINY_PREPARATIONS,
        on_cpu=((TINY, 2),),
    )


def run(
    recorder: Recorder,
    suite: Suite,
    parts: Iterable[str] = PARTS,
    *,
    jobs: int | None = None,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Measure the parts of a suite: what is asked for before what surrounds it, and ceilings, which ratios need, first.

    Args:
        recorder: takes ceilings and rows, and says when the time is over.
        suite: what.
        parts: which of `PARTS`.
        jobs: processes that compile, None for one on each CPU.
        keep: called after each stage, so that a process that is killed loses one at the most.
    """
    wanted = frozenset(parts)
    if recorder.device.type == "cuda":
        recorder.attempt("compile kernels", lambda: _compile(recorder, suite, wanted, jobs))
    begin = recorder.elapsed
    for name, stage in _stages(recorder, suite, wanted):
        stage()
        keep()
        recorder.tell(f"[{recorder.elapsed:6.1f} s] == {name}: {recorder.elapsed - begin:.1f} s")
        begin = recorder.elapsed


def _stages(recorder: Recorder, suite: Suite, wanted: frozenset[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Parts of a run in their order, by name."""

    def decode_rates(pairs: tuple[tuple[str, str], ...]) -> None:
        for book, k in pairs:
            recorder.attempt(f"decode {book} K={k}", partial(measure_decode, recorder, book, k))

    def ceilings() -> None:
        recorder.attempt("device copy", lambda: measure_copy(recorder))
        recorder.attempt("bf16 GEMM", lambda: measure_gemm(recorder))
        decode_rates(suite.decoded)

    def ops(group: str) -> None:
        sizes = TINY_SIZES if suite.sizes_on_cpu else GPU_SIZES
        recorder.attempt(f"ops: {group}", partial(measure_ops, recorder, group, sizes))

    def prepare(preparation: Preparation) -> None:
        recorder.attempt(
            f"prepare {preparation.name}", partial(measure_layer_preparations, recorder, preparation)
        )  # fmt: skip

    def on_cpu(preset: Preset, tokens: int) -> None:
        recorder.attempt(f"{preset.key} on the CPU", partial(compare_cpu, recorder, preset, tokens))

    has_layers = bool(wanted & {"layer", "compare"})
    yield "ceilings", ceilings
    if "compare" in wanted and recorder.device.type == "cuda":
        yield "other projects", partial(_say_of_peer, recorder)
    for layer in suite.layers if has_layers else ():
        yield layer.preset.key, partial(_measure_layer, recorder, layer, wanted)
    for group in suite.groups if "op" in wanted else ():
        yield f"ops: {group}", partial(ops, group)
    for preparation in suite.preparations if "prepare" in wanted else ():
        yield f"prepare {preparation.name}", partial(prepare, preparation)
    if "ceiling" in wanted:
        yield "further ceilings", partial(decode_rates, suite.further)
    for layer in suite.around if has_layers else ():
        yield f"{layer.preset.key} around", partial(_measure_layer, recorder, layer, wanted)
    for preparation in suite.further_preparations if "prepare" in wanted else ():
        yield f"prepare {preparation.name} further", partial(prepare, preparation)
    for preset, tokens in suite.on_cpu if "compare" in wanted else ():
        yield f"{preset.key} on the CPU", partial(on_cpu, preset, tokens)


def _measure_layer(recorder: Recorder, layer: LayerRun, wanted: frozenset[str]) -> None:
    bench: LayerBench | None = None

    def made() -> LayerBench:
        nonlocal bench
        bench = LayerBench(layer.preset, recorder.device) if bench is None else bench
        return bench

    def take(tokens: int, arithmetic: str) -> None:
        made().measure(
            recorder,
            tokens,
            arithmetic=arithmetic,
            io_dtype=layer.io_dtype,
            scratch_bound=layer.scratch_bound,
            eager=tokens in _EAGER_COUNTS,
        )

    name = f"{layer.preset.key} {layer.io_dtype}"
    for tokens, arithmetic in layer.runs() if "layer" in wanted else ():
        recorder.attempt(f"{name}, {tokens} tokens, {arithmetic}", partial(take, tokens, arithmetic))
    if "compare" in wanted and layer.compared:
        decoded: list[GroupedLayer] = []
        recorder.attempt(f"{name}, decoded to bf16", lambda: decoded.append(GroupedLayer(made().layers[0])))
        for tokens in layer.compared if decoded else ():
            recorder.attempt(
                f"{name}, {tokens} tokens, compared",
                partial(compare, recorder, made(), tokens, decoded=decoded[0]),
            )


def _say_of_peer(recorder: Recorder) -> None:
    found = importlib.util.find_spec("exllamav3") is not None
    why = "its loader alone makes its layers" if found else "it is not installed"
    recorder.skip("exllamav3 in turns with trellis", f"{why}; its times that were measured elsewhere are shown")


def _compile(recorder: Recorder, suite: Suite, wanted: frozenset[str], jobs: int | None) -> None:
    limits = device_limits(recorder.device)
    count = 0 if limits is None else precompile(suite, wanted, limits, jobs=jobs)
    recorder.tell(f"    {count} kernels are ready")


def precompile(suite: Suite, wanted: frozenset[str], limits: DeviceLimits, *, jobs: int | None = None) -> int:
    """Compile in processes what a suite launches, so that no measurement waits for a compiler; needs no GPU.

    Args:
        suite: what will be measured.
        wanted: which of `PARTS`.
        limits: of the device that will measure.
        jobs: processes that compile, None for one on each CPU.

    Returns:
        How many kernels are ready.
    """
    keys = dict.fromkeys(suite_keys(suite, wanted, limits))
    compiler.precompile(keys, jobs=jobs)
    return len(keys)


def suite_keys(suite: Suite, wanted: frozenset[str], limits: DeviceLimits) -> list[KernelKey]:
    """Every kernel that a suite launches; a layer whose plan is refused has none, and fails where it is measured."""
    keys: list[KernelKey] = []
    for layer in (*suite.layers, *suite.around) if wanted & {"layer", "compare"} else ():
        for tokens, arithmetic in [*layer.runs(), *((tokens, "exact") for tokens in layer.compared)]:
            keys += _plan_keys(layer, tokens, arithmetic, limits)
        if "compare" in wanted and layer.compared:
            keys += contender_keys(layer.preset, limits.arch)
    for group in suite.groups if "op" in wanted else ():
        keys += op_case_keys(group, GPU_SIZES, limits.arch)
    further = suite.further if "ceiling" in wanted else ()
    return [*keys, *ceiling_keys([*suite.decoded, *further], limits.arch)]


def _plan_keys(layer: LayerRun, tokens: int, arithmetic: str, limits: DeviceLimits) -> Sequence[KernelKey]:
    try:
        plan = plan_layer(
            layer.preset,
            tokens,
            device=torch.device("cuda"),
            arithmetic=arithmetic,
            io_dtype=layer.io_dtype,
            scratch_bound=layer.scratch_bound,
            limits=limits,
        )
    except MoeError:
        return ()
    return plan.compile_keys()
