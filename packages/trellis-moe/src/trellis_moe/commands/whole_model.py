"""Owns the way from a folder to a whole model and its tokenizer, and the refusal of what is unsound there.

It must not know what is generated.  transformers is imported where it is used; what it raises is told in one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trellis_format.checkpoint import CONFIG_NAME
from trellis_format.exl3.declared import EXL3_METHOD
from trellis_format.files.strict_json import read_json
from trellis_moe.commands.files import check_path
from trellis_moe.errors import MoeMemoryError, MoeUnsupportedError, MoeValueError
from trellis_moe.memory import is_out_of_memory

__all__ = ["check_model", "load_whole", "muted", "open_tokenizer", "read_limits", "refusing"]

_MOST_JOBS = 8  # processes that compile kernels; each takes a few hundred MB
_MOST_LETTERS = 300  # of another library's message
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Turn what other libraries raise over an unsound file into one line.  Errors of trellis' own code pass.

    Args:
        path: of the model.
        what: is done, to follow "cannot".

    Raises:
        MoeMemoryError: if memory ran out.
        MoeValueError: from anything else that was raised.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("trellis_"):
            raise
        if is_out_of_memory(error):
            raise MoeMemoryError(f"{path}: cannot {what}: out of memory: {_first_line(error)}") from error
        if _is_defect(error):
            raise
        raise MoeValueError(f"{path}: cannot {what}: {type(error).__name__}: {_first_line(error)}") from error


def _is_defect(error: BaseException) -> bool:
    """Whether the packages' own code raised what is no error of theirs: the innermost frame is there."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("trellis_")


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MOST_LETTERS] or "it does not say why"


@contextmanager
def muted() -> Iterator[None]:
    """No bars and no advice from transformers, whose lines would stand among the command's own."""
    from transformers.utils import logging

    level, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()


def check_model(path: Path) -> None:
    """Refuse what cannot be loaded, before torch or transformers reads anything of it.

    Raises:
        FormatError: if config.json cannot be read.
        MoeValueError: if the folder has none.
        MoeUnsupportedError: if it states another quantisation, or a model that transformers lacks.
    """
    check_path(path)
    if not (path / CONFIG_NAME).is_file():
        raise MoeValueError(f"{path} has no {CONFIG_NAME}, which says what model it is")
    config = read_json(path / CONFIG_NAME)
    stated = config.get("quantization_config") if isinstance(config, dict) else None
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    if method != EXL3_METHOD:
        raise MoeUnsupportedError(f"{path}: quant_method is {method!r}; whole models are loaded from {EXL3_METHOD!r}")
    from transformers import CONFIG_MAPPING, __version__

    from trellis_moe.integrations.transformers import ARCHITECTURES

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise MoeUnsupportedError(
            f"{path}: model type {model_type!r} is not in transformers {__version__}; supported with experts: "
            f"{', '.join(ARCHITECTURES)}"
        )


def read_limits(path: Path) -> tuple[int | None, int | None]:
    """Ids that a model's embedding has and positions that it was made for, by its configuration; None if not stated.

    Raises:
        MoeValueError: if transformers does not take the configuration.
    """
    from transformers import AutoConfig

    with refusing(path, f"read {CONFIG_NAME}"), muted():
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    return _stated(config, "vocab_size"), _stated(config, "max_position_embeddings")


def _stated(config: Any, key: str) -> int | None:
    size = getattr(config, key, None)
    return size if isinstance(size, int) and size > 0 else None


def open_tokenizer(path: Path, *, is_needed: bool) -> Any | None:
    """The tokenizer of a model's folder.

    Args:
        path: of the model.
        is_needed: whether one that is missing is refused.

    Returns:
        None if there is none, or, where none is needed, none that transformers can open.

    Raises:
        MoeValueError: if one is needed and missing or broken.
    """
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        if is_needed:
            raise MoeValueError(f"{path} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); give token ids with --ids")
        return None
    from transformers import AutoTokenizer

    try:
        with refusing(path, "open the tokenizer (token ids can be given with --ids)"), muted():
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except MoeValueError:
        if is_needed:
            raise
        return None


def load_whole(
    path: Path, *, device: torch.device, dtype: torch.dtype | None, progress: Callable[[str, int, int], None]
) -> tuple[Any, list[str]]:
    """Load a model, every weight of which comes from its folder.

    Args:
        path: of the model.
        device: that all of it is on.
        dtype: of activations; None is the checkpoint's.
        progress: called with a module's path, bytes that are loaded, and bytes in all.

    Returns:
        The model, and warnings: tensors of the folder that the model has no place for.

    Raises:
        FormatError, PrepError, MoeError: if the checkpoint or the device does not hold up.
        MoeValueError: if a weight of the model is missing or has another shape; names the first, and both shapes.
    """
    from trellis_moe.integrations.transformers import TrellisOptions, load_model

    options = TrellisOptions(compile_jobs=min(os.cpu_count() or 1, _MOST_JOBS), progress=progress)
    arguments: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    if dtype is not None:
        arguments["dtype"] = dtype
    with refusing(path, "load the model"), muted():
        model, found = load_model(
            path,
            options,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **arguments,
        )
    _check_loaded(path, type(model).__name__, found)
    unread = sorted(found["unexpected_keys"])
    if not unread:
        return model, []
    return model, [f"{path}: tensors that {type(model).__name__} has no place for: {len(unread)}, first {unread[0]}"]


def _check_loaded(path: Path, model: str, found: dict[str, Any]) -> None:
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise MoeValueError(f"{path}: {name} has shape {list(stored)} in the checkpoint, {list(wanted)} in the model")
    missing = sorted(found["missing_keys"])
    if missing:
        raise MoeValueError(
            f"{path}: weights of {model} that it lacks: {len(missing)}, first {missing[0]}; either tensors are "
            f"missing, or {CONFIG_NAME} states another model; see `trellis-format validate`"
        )
