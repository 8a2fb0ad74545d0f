"""Owns the continuation of a prompt by a whole model: its tokens as they come, and how fast they came.

It must not print.  transformers is imported where it is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trellis_format.checkpoint import CONFIG_NAME
from trellis_format.exl3.declared import EXL3_METHOD
from trellis_format.files.strict_json import read_json
from trellis_moe.commands.files import check_path
from trellis_moe.commands.layer import choose_device
from trellis_moe.commands.progress import progress_bar
from trellis_moe.errors import MoeUnsupportedError, MoeValueError
from trellis_moe.specs import IO_DTYPES

__all__ = ["GENERATE_SCHEMA", "SCHEMA_VERSION", "GenerateRequest", "TokenWatch", "generate"]

GENERATE_SCHEMA = "trellis-moe.generate"
"""Name of the report's schema."""
SCHEMA_VERSION = 1
"""Version of the report; bumped with any change of meaning."""
_MOST_JOBS = 8  # processes that compile kernels; each takes a few hundred MB
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What to generate.

    Args:
        model: directory of the checkpoint.
        prompt: text to continue, or None where ids are given.
        ids: token ids to continue, or None where text is given.
        device: `cpu`, `cuda`, or None for a GPU where there is one.
        dtype: of activations, a key of `IO_DTYPES`; None is the checkpoint's.
        max_new_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: of the draws.
        is_static: whether the cache of keys and values has a fixed size; on a GPU, steps then are CUDA graphs, which
            take a while to compile.

    Raises:
        MoeValueError: if there is no prompt or two, or a number is out of range.
    """

    model: Path
    prompt: str | None = None
    ids: tuple[int, ...] | None = None
    device: str | None = None
    dtype: str | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    is_static: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.ids is None):
            raise MoeValueError(f"{'neither' if self.prompt is None else 'both'} of --prompt and --ids; give one")
        if self.ids is not None and not self.ids:
            raise MoeValueError("--ids has no token; give at least 1")
        if self.max_new_tokens <= 0:
            raise MoeValueError(f"--max-new-tokens must be positive, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise MoeValueError(f"--temperature must be 0 or more and finite, got {self.temperature}")


class TokenWatch:
    """Follows the tokens of one sequence as transformers hands them to a streamer.

    Args:
        show: called with each piece of text, or with each id and a space where there is no tokenizer; None shows none.
        tokenizer: from ids to text, or None.
    """

    def __init__(self, show: Callable[[str], None] | None, tokenizer: Any | None) -> None:
        self._show = show
        self._tokenizer = tokenizer
        self._shown = ""
        self._has_prompt = False
        self.ids: list[int] = []
        self.times: list[float] = []

    @property
    def text(self) -> str:
        """What was generated so far."""
        if self._tokenizer is None:
            return " ".join(map(str, self.ids))
        return str(self._tokenizer.decode(self.ids, skip_special_tokens=True))

    def put(self, value: torch.Tensor) -> None:
        """Take tokens: first the prompt's, then each one that is generated.

        Args:
            value: `[1]` or `[1, tokens] int64`.
        """
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.ids += value.reshape(-1).tolist()
        self.times.append(time.perf_counter())
        text = self.text
        # a character whose bytes are not all there yet waits for the tokens that have them
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show_up_to(text)

    def end(self) -> None:
        """Show what waited for more."""
        self._show_up_to(self.text)

    def _show_up_to(self, text: str) -> None:
        if self._show is not None and len(text) > len(self._shown):
            self._show(text[len(self._shown) :])
            self._shown = text


def generate(
    request: GenerateRequest, *, show: Callable[[str], None] | None = None, show_progress: bool = True
) -> dict[str, Any]:
    """Load a model and continue a prompt.

    Args:
        request: what to generate.
        show: called with each piece of text as it comes; None shows none.
        show_progress: whether loading may show a bar.

    Returns:
        A report for machines, with the ids, the text and times in seconds.

    Raises:
        FormatError, PrepError, MoeError: if the checkpoint, the model or the device does not hold up.
    """
    device = choose_device(request.device)
    _check_model(request.model)
    from trellis_moe.integrations.transformers import TrellisOptions, load_model

    tokenizer = _open_tokenizer(request)
    begin = time.perf_counter()
    with _quiet(), progress_bar(show_progress) as tell:
        options = TrellisOptions(
            compile_jobs=min(os.cpu_count() or 1, _MOST_JOBS),
            progress=lambda _path, done, total: tell("load", done, total),
        )
        model = load_model(request.model, options, **_placement(device), **_dtype(request))
    loaded = time.perf_counter()
    ids = torch.tensor([_prompt_ids(request, tokenizer, model)], device=device)
    watch = TokenWatch(show, tokenizer)
    torch.manual_seed(request.seed)
    begin_run = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **_choices(request, model))
    return _report(request, model, ids, watch, loaded - begin, begin_run)


def _check_model(path: Path) -> None:
    """Refuse what cannot be loaded, before torch or transformers reads anything of it."""
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
    if model_type not in CONFIG_MAPPING:
        raise MoeUnsupportedError(
            f"{path}: model type {model_type!r} is not in transformers {__version__}; supported with experts: "
            f"{', '.join(ARCHITECTURES)}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
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


def _placement(device: torch.device) -> dict[str, Any]:
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _dtype(request: GenerateRequest) -> dict[str, Any]:
    return {} if request.dtype is None else {"dtype": IO_DTYPES[request.dtype]}


def _open_tokenizer(request: GenerateRequest) -> Any | None:
    if not any((request.model / name).is_file() for name in _TOKENIZER_FILES):
        if request.prompt is not None:
            raise MoeValueError(
                f"{request.model} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); give token ids with --ids"
            )
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(request.model)


def _prompt_ids(request: GenerateRequest, tokenizer: Any | None, model: Any) -> list[int]:
    vocabulary = model.get_input_embeddings().num_embeddings
    if request.ids is not None:
        ids = list(request.ids)
    else:
        assert tokenizer is not None  # text was refused where there is none
        ids = tokenizer(request.prompt)["input_ids"]
    if not ids:
        raise MoeValueError("the prompt has no token; give at least one character that the tokenizer knows")
    wrong = [number for number in ids if not 0 <= number < vocabulary]
    if wrong:
        raise MoeValueError(f"token id {wrong[0]} is outside the vocabulary of {vocabulary}; ids are from 0")
    return ids


def _choices(request: GenerateRequest, model: Any) -> dict[str, Any]:
    """The arguments of transformers' `generate`."""
    chosen: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "do_sample": request.temperature > 0,
        "pad_token_id": model.generation_config.pad_token_id or 0,  # one sequence is never padded
    }
    if request.temperature > 0:
        chosen |= {"temperature": request.temperature}
    if request.is_static:
        chosen |= {"cache_implementation": "static"}
    return chosen


def _report(
    request: GenerateRequest, model: Any, ids: torch.Tensor, watch: TokenWatch, load_seconds: float, begin: float
) -> dict[str, Any]:
    from trellis_moe.integrations.transformers import TrellisExperts
    from trellis_moe.linear import TrellisLinear

    modules = list(model.modules())
    first, last = (watch.times[0], watch.times[-1]) if watch.times else (begin, begin)
    steps = len(watch.times) - 1
    return {
        "schema": GENERATE_SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": str(request.model),
        "model_type": model.config.model_type,
        "device": str(ids.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "expert_layers": sum(isinstance(module, TrellisExperts) for module in modules),
        "linears": sum(isinstance(module, TrellisLinear) for module in modules),
        "prompt_ids": ids[0].tolist(),
        "new_ids": watch.ids,
        "text": watch.text,
        "seconds": {"load": load_seconds, "first_token": first - begin, "other_tokens": last - first},
        "tokens_per_second": steps / (last - first) if steps > 0 else None,
    }
