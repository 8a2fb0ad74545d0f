"""Owns the continuation of a prompt by a whole model: its tokens as they come, and how fast they came.

It must not print.  transformers is imported where it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trellis_moe.commands.layer import choose_device
from trellis_moe.commands.progress import progress_bar
from trellis_moe.commands.whole_model import (
    check_model,
    load_whole,
    muted,
    open_tokenizer,
    read_limits,
    refusing,
)
from trellis_moe.errors import MoeValueError
from trellis_moe.specs import IO_DTYPES

__all__ = ["GENERATE_SCHEMA", "SCHEMA_VERSION", "GenerateRequest", "TokenWatch", "generate"]

GENERATE_SCHEMA = "trellis-moe.generate"
"""Name of the report's schema."""
SCHEMA_VERSION = 1
"""Version of the report; bumped with any change of meaning."""
_SEEDS = 1 << 64  # of torch's generators


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
        if not 0 <= self.seed < _SEEDS:
            raise MoeValueError(f"--seed must be 0 or more and below {_SEEDS}, got {self.seed}")


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
    request: GenerateRequest,
    *,
    show: Callable[[str], None] | None = None,
    show_progress: bool = True,
    warn: Callable[[str], None] = lambda _warning: None,
    begin_with: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Load a model and continue a prompt.

    Args:
        request: what to generate.
        show: called with each piece of text as it comes; None shows none.
        show_progress: whether loading may show a bar.
        warn: called with each warning, before the first token.
        begin_with: called once, when everything is loaded and nothing was refused.

    Returns:
        A report for machines, with the ids, the text, times in seconds and the warnings.

    Raises:
        FormatError, PrepError, MoeError: if the checkpoint, the model or the device does not hold up.
    """
    device = choose_device(request.device)
    check_model(request.model)
    vocabulary, positions = read_limits(request.model)
    tokenizer = open_tokenizer(request.model, is_needed=request.prompt is not None)
    given = _prompt_ids(request, tokenizer)
    _check_ids(request, given, vocabulary, positions)
    begin = time.perf_counter()
    dtype = None if request.dtype is None else IO_DTYPES[request.dtype]
    with progress_bar(show_progress) as tell:
        model, warnings = load_whole(
            request.model, device=device, dtype=dtype, progress=lambda _path, done, total: tell("load", done, total)
        )
    loaded = time.perf_counter()
    for warning in warnings:
        warn(warning)
    begin_with()
    ids = torch.tensor([given], device=device)
    watch = TokenWatch(show, tokenizer)
    torch.manual_seed(request.seed)
    begin_run = time.perf_counter()
    with refusing(request.model, "generate"), muted():
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **_choices(request, model))
    return _report(request, model, ids, watch, loaded - begin, begin_run) | {"warnings": warnings}


def _prompt_ids(request: GenerateRequest, tokenizer: Any | None) -> list[int]:
    if request.ids is not None:
        return list(request.ids)
    assert tokenizer is not None  # text was refused where there is none
    with refusing(request.model, "take the prompt apart"):
        ids: list[int] = tokenizer(request.prompt)["input_ids"]
    if not ids:
        raise MoeValueError("the prompt has no token; give at least one character that the tokenizer knows")
    return ids


def _check_ids(request: GenerateRequest, ids: list[int], vocabulary: int | None, positions: int | None) -> None:
    """Refuse what the model has no embedding or position for, before it is loaded."""
    wrong = [number for number in ids if number < 0 or (vocabulary is not None and number >= vocabulary)]
    if wrong:
        raise MoeValueError(f"token id {wrong[0]} is outside the vocabulary of {vocabulary}; ids are from 0")
    if positions is None or len(ids) + request.max_new_tokens <= positions:
        return
    if len(ids) >= positions:
        raise MoeValueError(f"the prompt has {len(ids)} tokens; with one more, the model has {positions} positions")
    raise MoeValueError(
        f"--max-new-tokens {request.max_new_tokens} after a prompt of {len(ids)}: the model has {positions} positions, "
        f"so at most {positions - len(ids)}"
    )


def _choices(request: GenerateRequest, model: Any) -> dict[str, Any]:
    """The arguments of transformers' `generate`."""
    chosen: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "do_sample": request.temperature > 0,
        "num_beams": 1,  # text is shown as it comes, whatever the model's own configuration asks for
        "num_return_sequences": 1,
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
