"""Owns the input and output files of `trellis-moe run`: what they must hold, and writing without a half-written file.

It must not know layers beyond their sizes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trellis_format.files import read_header
from trellis_moe.errors import MoeTypeError, MoeValueError

__all__ = ["LayerInput", "check_output_path", "check_path", "read_input", "write_output"]

_X_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_ID_DTYPES = {"I32": torch.int32, "I64": torch.int64}


@dataclass(frozen=True, eq=False)
class LayerInput:
    """A checked input: `x [tokens, hidden]`, `topk_ids [tokens, top_k]`, `topk_weights [tokens, top_k]`."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def check_path(path: Path) -> None:
    """Accept what can be a path at all.

    Raises:
        MoeValueError: if it holds a NUL, which no file system takes.
    """
    if "\0" in str(path):
        raise MoeValueError(f"{path}: a path cannot hold a NUL, this one has it at index {str(path).index(chr(0))}")


def read_input(path: Path, *, hidden_size: int, num_experts: int) -> LayerInput:
    """Read and check an input file.

    Args:
        path: a safetensors file with `x`, `topk_ids` and `topk_weights`.
        hidden_size: channels that x must have.
        num_experts: experts of the layer; ids are -1 (no expert) or below it.

    Raises:
        FormatNotFoundError, FormatValueError: if the file is not there or not sound.
        MoeTypeError: if a dtype is wrong.
        MoeValueError: if a tensor is missing, a shape is wrong, an id is out of range, or a route weight is not finite;
            names the file, the tensor, the place and both numbers.
    """
    check_path(path)
    header = read_header(path)
    for name, dtypes in (("x", _X_DTYPES), ("topk_ids", _ID_DTYPES), ("topk_weights", _X_DTYPES)):
        if name not in header.entries:
            raise MoeValueError(
                f"{path}: {name}: missing; the input needs x, topk_ids and topk_weights, it has: "
                f"{', '.join(sorted(header.entries)[:8]) or 'nothing'}"
            )
        entry = header.entries[name]
        if entry.dtype not in dtypes:
            raise MoeTypeError(f"{path}: {name}: must be {' or '.join(dtypes)}, got {entry.dtype}")
        if len(entry.shape) != 2:
            raise MoeValueError(f"{path}: {name}: must have two axes, got shape {list(entry.shape)}")
    x, ids, weights = (header.entries[name].shape for name in ("x", "topk_ids", "topk_weights"))
    if x[1] != hidden_size:
        raise MoeValueError(f"{path}: x: has {x[1]} channels, the layer takes {hidden_size}")
    if ids[0] != x[0] or weights != ids:
        raise MoeValueError(
            f"{path}: topk_ids {list(ids)} and topk_weights {list(weights)} must both be [tokens, top_k] with "
            f"{x[0]} tokens as x"
        )
    if ids[1] == 0:
        raise MoeValueError(f"{path}: topk_ids: top_k is 0; a token needs at least one route (-1 is no expert)")
    data = LayerInput(*_load(path, "x", "topk_ids", "topk_weights"))
    _check_ids(path, data.topk_ids, num_experts)
    _check_weights(path, data.topk_weights)
    return data


def check_output_path(path: Path, *, source: Path, checkpoint: Path) -> None:
    """Accept a path that can be written, before any work is done.

    Args:
        path: the output; where it is a link, what it leads to.
        source: the input file, which must stay.
        checkpoint: the checkpoint's directory, whose files must stay.

    Raises:
        MoeValueError: if a path holds a NUL, its directory does not exist or is not writable, it is a directory or a
            device, it is the input, or it is a file of the checkpoint.
    """
    for each in (path, source, checkpoint):
        check_path(each)
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise MoeValueError(f"{path}: the output must be a file, this is a directory")
        if not target.parent.is_dir():
            raise MoeValueError(f"{path}: the directory {target.parent} does not exist")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise MoeValueError(f"{path}: the directory {target.parent} is not writable")
        if not target.exists():
            return
        if not stat.S_ISREG(target.stat().st_mode):
            raise MoeValueError(f"{path}: the output must be a regular file, this is a device, a pipe or a socket")
    except OSError as error:
        raise MoeValueError(f"{path}: cannot be written: {error.strerror or error}") from error
    if _is_same(target, source):
        raise MoeValueError(f"{path}: the output must not be the input file")
    with contextlib.suppress(OSError):  # a directory that cannot be listed is refused where it is opened
        if any(_is_same(target, file) for file in checkpoint.iterdir()):
            raise MoeValueError(f"{path}: the output must not be a file of the checkpoint {checkpoint}")


def write_output(path: Path, y: torch.Tensor) -> None:
    """Write `y [tokens, hidden] float32` beside its place under a temporary name, then rename it.

    Raises:
        MoeValueError: if the file cannot be written; nothing is left behind.
    """
    target = os.path.realpath(path)  # a link stays, and what it leads to is replaced
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".trellis-", suffix=".part")
        os.close(handle)
        try:
            save_file({"y": y.contiguous()}, temporary)
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes private files, an output is an ordinary one
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except (OSError, SafetensorError) as error:
        raise MoeValueError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _is_same(target: Path, other: Path) -> bool:
    try:
        return target.samefile(other)
    except OSError:
        return False


def _load(path: Path, *names: str) -> list[torch.Tensor]:
    """Those tensors of a file; others may have dtypes that torch lacks."""
    try:
        with safe_open(path, framework="pt") as file:
            return [file.get_tensor(name).contiguous() for name in names]
    except (OSError, SafetensorError) as error:
        raise MoeValueError(f"{path}: cannot be read: {error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_ids(path: Path, ids: torch.Tensor, num_experts: int) -> None:
    bad = (ids < -1) | (ids >= num_experts)
    if bad.any():
        token, slot = bad.nonzero()[0].tolist()
        raise MoeValueError(
            f"{path}: topk_ids: id {int(ids[token, slot])} at token {token}, slot {slot} is not an expert; the layer "
            f"has {num_experts} (0..{num_experts - 1}, or -1 for none)"
        )


def _check_weights(path: Path, weights: torch.Tensor) -> None:
    bad = ~torch.isfinite(weights)
    if bad.any():
        token, slot = bad.nonzero()[0].tolist()
        raise MoeValueError(
            f"{path}: topk_weights: {float(weights[token, slot])} at token {token}, slot {slot}; route weights must be "
            "finite"
        )
