"""Owns what a caller may choose about loading a model, and how it reaches the quantizer.  It must not load anything.

transformers hands a quantizer what the checkpoint's configuration states and nothing of the caller's, so options go
through a context variable that `load_model` sets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForCausalLM

from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_prep import TrellisStaging

__all__ = ["TrellisOptions", "current_options", "load_model", "using_options"]


@dataclass(frozen=True, kw_only=True)
class TrellisOptions:
    """How a model is loaded and run.

    Args:
        max_tokens: tokens of the largest launch of an expert layer; a longer input takes several.
        scratch_bytes: most bytes of scratch, which all expert layers share; a plan cuts its launches to stay within.
        staging: bounds on the host memory through which weights reach the device.
        group: ranks that share out every expert's intermediate channels, each holding its part; None is one rank.  All
            of them load the same checkpoint and run the same inputs, and every other weight is on each of them.
        compile_jobs: processes that compile the kernels of linears; more than one needs the persistent cache, and a
            main module that may be imported.
        progress: called with (module, bytes done, bytes in all) after each quantised module is on the device.

    Raises:
        MoeTypeError: if a number is not an int.
        MoeValueError: if it is not positive.
    """

    max_tokens: int = 8192
    scratch_bytes: int = 256 << 20
    staging: TrellisStaging = field(default_factory=TrellisStaging)
    group: dist.ProcessGroup | None = None
    compile_jobs: int = 1
    progress: Callable[[str, int, int], None] | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "scratch_bytes", "compile_jobs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise MoeTypeError(f"{name} must be an int, got {type(value).__name__}")
            if value <= 0:
                raise MoeValueError(f"{name} must be positive, got {value}")


_CURRENT: ContextVar[TrellisOptions | None] = ContextVar("trellis_options", default=None)


def current_options() -> TrellisOptions:
    """The options of the load that is going on; the defaults outside of one."""
    return _CURRENT.get() or TrellisOptions()


@contextmanager
def using_options(options: TrellisOptions) -> Iterator[None]:
    """Let what is loaded in this context follow the options."""
    token = _CURRENT.set(options)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def load_model(
    path: str | os.PathLike[str],
    options: TrellisOptions | None = None,
    *,
    auto_class: Any = AutoModelForCausalLM,
    **arguments: Any,
) -> Any:
    """Load an EXL3 checkpoint into its Hugging Face model class.

    Args:
        path: a checkpoint's directory, or its name on the Hub.
        options: see `TrellisOptions`; None is the defaults, which `from_pretrained` alone has too.
        auto_class: which auto class, or model class, loads it.
        arguments: those of `from_pretrained`, such as `device_map` (one device) and `dtype`.

    Returns:
        The model, for inference.

    Raises:
        FormatError, PrepError, MoeError: if the checkpoint, a device or an architecture does not hold up.
    """
    with using_options(options or TrellisOptions()):
        return auto_class.from_pretrained(path, **arguments)
