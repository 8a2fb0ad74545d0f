"""Owns the step before serving: every kernel of some plans compiled and loaded, then no compiling any more.

It must not know weights.  Kernels are the process's, so a session that froze them binds every other one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from trellis_kernels import ColdKernelError
from trellis_kernels.cute import compiler
from trellis_kernels.cute.keys import KernelKey
from trellis_moe.errors import MoeTypeError
from trellis_moe.observe import LOG

__all__ = ["Session", "make_ready"]


class _Plan(Protocol):
    """An `ExecutionPlan`, or one of a rank among many."""

    def compile_keys(self) -> tuple[KernelKey, ...]: ...


class Session:
    """Compiles what plans need, and then forbids to compile.

    After `prepare`, binding a plan with a kernel that was not prepared raises, and so does a launch; nothing compiles
    behind a server's back.  Plans without kernels, those of a CPU, bind at any time.
    """

    @property
    def frozen(self) -> bool:
        """Whether launches and bindings may not compile."""
        return compiler.is_frozen()

    @property
    def kernel_count(self) -> int:
        """Kernels that the process has compiled or read from its cache; stays the same while nothing compiles."""
        return compiler.kernel_count()

    def prepare(
        self,
        plans: Iterable[_Plan],
        *,
        jobs: int | None = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile every kernel of some plans, put those of this device on it, and freeze.

        May be called again for further plans.

        Args:
            plans: what will be bound, each an `ExecutionPlan` or a `ParallelPlan`.
            jobs: processes that compile, None for one on each CPU; more than one needs the persistent cache.
            progress: called with (kernels done, kernels in all).

        Raises:
            MoeTypeError: if one is not a plan.
            KernelUnsupportedError: if nvidia-cutlass-dsl is not installed and a plan has kernels.
        """
        plans = tuple(plans)
        for plan in plans:
            if not callable(getattr(plan, "compile_keys", None)):
                raise MoeTypeError(f"plan must be an ExecutionPlan or a ParallelPlan, got {type(plan).__name__}")
        keys = tuple(dict.fromkeys(key for plan in plans for key in plan.compile_keys()))
        LOG.info("%d kernels of %d plans are made ready", len(keys), len(plans))
        compiler.precompile(keys, jobs=jobs, progress=progress)
        compiler.freeze()

    def thaw(self) -> None:
        """Allow compiling again."""
        compiler.thaw()


def make_ready(plan: _Plan) -> None:
    """Make every kernel of a plan ready, unless that is forbidden.

    Raises:
        ColdKernelError: if kernels are frozen and one of the plan's is not ready; names its key.
    """
    missing = compiler.cold(plan.compile_keys())
    if missing and compiler.is_frozen():
        raise ColdKernelError(
            f"the plan has {len(missing)} kernels that are not ready, and compilation is frozen; the first is "
            f"[{missing[0]}]: give the plan to Session.prepare() before binding it; its key is {missing[0]!r}"
        )
    compiler.precompile(missing)
