"""Holds input and output files to their rules: a refusal names file, tensor and both numbers, and leaves nothing."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import exl3_files
from moe.samples import bits, write_input
from trellis_format.errors import FormatNotFoundError, FormatValueError
from trellis_format.files import read_header
from trellis_moe import MoeError, MoeTypeError, MoeValueError
from trellis_moe.commands import files
from trellis_moe.commands.files import check_output_path, check_path, read_input, write_output


def tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    plain: dict[str, torch.Tensor | None] = {
        "x": torch.arange(6 * 128).view(6, 128).to(torch.float16),
        "topk_ids": torch.tensor([[0, 1], [1, -1], [2, 2], [0, 0], [1, 2], [-1, -1]]),
        "topk_weights": torch.rand(6, 2),
    }
    return {name: tensor for name, tensor in (plain | changes).items() if tensor is not None}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_each_dtype_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    given = tensors()
    given = {name: tensor.to(id_dtype if name == "topk_ids" else dtype) for name, tensor in given.items()}
    data = read_input(write_input(tmp_path / "in.safetensors", **given), hidden_size=128, num_experts=3)
    for name, tensor in given.items():
        found = getattr(data, name)
        assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_no_tokens_are_an_input(tmp_path: Path) -> None:
    given = {name: tensor[:0] for name, tensor in tensors().items()}
    data = read_input(write_input(tmp_path / "in.safetensors", **given), hidden_size=128, num_experts=3)
    assert (data.x.shape, data.topk_ids.shape) == ((0, 128), (0, 2))


def test_other_tensors_are_not_read(tmp_path: Path) -> None:
    """A dtype that torch lacks may stand beside the input."""
    given: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors().items()}
    given["extra"] = exl3_files.Raw("F6_E2M3", (4,), bytes(3))
    path = exl3_files.write_shard(tmp_path / "in.safetensors", given)
    assert read_input(path, hidden_size=128, num_experts=3).x.shape == (6, 128)


def place(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[4, 1] = value
    return changed


IDS, WEIGHTS = tensors()["topk_ids"], torch.ones(6, 2)
REFUSED: dict[str, tuple[dict[str, torch.Tensor | None], type[MoeError], tuple[str, ...]]] = {
    "no x": ({"x": None}, MoeValueError, ("x: missing", "topk_ids, topk_weights")),
    "no ids": ({"topk_ids": None}, MoeValueError, ("topk_ids: missing",)),
    "no weights": ({"topk_weights": None}, MoeValueError, ("topk_weights: missing",)),
    "wide": ({"x": torch.zeros(6, 256)}, MoeValueError, ("x: has 256 channels", "takes 128")),
    "flat": ({"x": torch.zeros(128)}, MoeValueError, ("x: must have two axes", "[128]")),
    "x of float64": ({"x": torch.zeros(6, 128).double()}, MoeTypeError, ("x: must be F16 or BF16 or F32", "F64")),
    "ids of int16": ({"topk_ids": IDS.short()}, MoeTypeError, ("topk_ids: must be I32 or I64", "I16")),
    "ids of float": ({"topk_ids": IDS.float()}, MoeTypeError, ("topk_ids: must be I32 or I64", "F32")),
    "weights of int": ({"topk_weights": IDS}, MoeTypeError, ("topk_weights: must be F16", "I64")),
    "few ids": ({"topk_ids": IDS[:5]}, MoeValueError, ("topk_ids [5, 2]", "topk_weights [6, 2]", "6 tokens")),
    "few weights": ({"topk_weights": WEIGHTS[:, :1]}, MoeValueError, ("topk_ids [6, 2]", "topk_weights [6, 1]")),
    "no slots": ({"topk_ids": IDS[:, :0], "topk_weights": WEIGHTS[:, :0]}, MoeValueError, ("top_k is 0",)),
    "id above": ({"topk_ids": place(IDS, 3)}, MoeValueError, ("id 3 at token 4, slot 1", "has 3 (0..2, or -1")),
    "id below": ({"topk_ids": place(IDS, -2)}, MoeValueError, ("id -2 at token 4, slot 1", "0..2")),
    "id of 64 bits": ({"topk_ids": place(IDS, 1 << 40)}, MoeValueError, (f"id {1 << 40} at token 4",)),
    "NaN": ({"topk_weights": place(WEIGHTS, float("nan"))}, MoeValueError, ("nan at token 4, slot 1", "finite")),
    "inf": ({"topk_weights": place(WEIGHTS, float("inf"))}, MoeValueError, ("inf at token 4, slot 1",)),
    "-inf": ({"topk_weights": place(WEIGHTS.half(), float("-inf"))}, MoeValueError, ("-inf at token 4, slot 1",)),
}


@pytest.mark.parametrize(("changes", "kind", "parts"), REFUSED.values(), ids=REFUSED)
def test_unsound_inputs_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], kind: type[MoeError], parts: tuple[str, ...]
) -> None:
    path = write_input(tmp_path / "in.safetensors", **tensors(**changes))
    with pytest.raises(kind) as caught:
        read_input(path, hidden_size=128, num_experts=3)
    assert str(caught.value).startswith(f"{path}: ")
    assert all(part in str(caught.value) for part in parts), caught.value


def test_unsound_files_are_refused(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.safetensors", **tensors())
    data = path.read_bytes()
    for length in (0, 7, 8, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(FormatValueError, match=str(path)):
            read_input(path, hidden_size=128, num_experts=3)
    for bad in (tmp_path / "absent", tmp_path):
        with pytest.raises((FormatNotFoundError, FormatValueError), match=str(bad)):
            read_input(bad, hidden_size=128, num_experts=3)


def test_a_file_that_changes_after_its_header_was_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input(tmp_path / "in.safetensors", **tensors())
    header = read_header(path)
    monkeypatch.setattr(files, "read_header", lambda path: header)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(MoeValueError, match=f"{path}: cannot be read"):
        read_input(path, hidden_size=128, num_experts=3)


def test_a_write_is_whole_and_an_ordinary_file(tmp_path: Path) -> None:
    path, y = tmp_path / "y.safetensors", torch.randn(5, 7)
    path.write_bytes(b"what was there before")
    write_output(path, y.T)
    assert bits(load_file(path)["y"]) == bits(y.T)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert os.listdir(tmp_path) == ["y.safetensors"]


def test_a_link_stays_and_leads_to_the_output(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "y.safetensors"
    target.parent.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    check_output_path(link, source=tmp_path / "in", checkpoint=tmp_path / "model")
    write_output(link, torch.ones(2, 3))
    assert link.is_symlink()
    assert load_file(target)["y"].sum() == 6
    assert os.listdir(target.parent) == ["y.safetensors"]


def test_names_as_long_as_the_system_takes_them(tmp_path: Path) -> None:
    path = tmp_path / ("y" * 255)
    check_output_path(path, source=tmp_path / "in", checkpoint=tmp_path)
    write_output(path, torch.ones(1, 1))
    assert os.listdir(tmp_path) == ["y" * 255]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
@pytest.mark.parametrize("step", ["save_file", "chmod", "replace"])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str
) -> None:
    path = tmp_path / "y.safetensors"
    path.write_bytes(b"what was there before")

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(files if step == "save_file" else os, step, fail)
    expected = MoeValueError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        write_output(path, torch.ones(2, 3))
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert str(caught.value) == f"{path}: cannot be written: No space left on device"
    assert os.listdir(tmp_path) == ["y.safetensors"]
    assert path.read_bytes() == b"what was there before"


def test_outputs_that_cannot_be_are_refused_beforehand(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.safetensors", **tensors())
    model = exl3_files.write_checkpoint(tmp_path / "model", {}, config={})
    hard, link = tmp_path / "hard", tmp_path / "link"
    hard.hardlink_to(source)
    link.symlink_to(model / "model.safetensors")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in (
        (tmp_path, "must be a file, this is a directory"),
        (Path("/"), "must be a file, this is a directory"),
        (tmp_path / "absent" / "y", f"directory {tmp_path / 'absent'} does not exist"),
        (source / "y", f"directory {source} does not exist"),
        (source, "must not be the input file"),
        (hard, "must not be the input file"),
        (model / "config.json", f"must not be a file of the checkpoint {model}"),
        (link, f"must not be a file of the checkpoint {model}"),
        (pipe, "must be a regular file"),
        (Path(os.devnull), "must be a regular file"),
        (tmp_path / ("y" * 256), "cannot be written: File name too long"),
    ):
        with pytest.raises(MoeValueError, match=words) as caught:
            check_output_path(path, source=source, checkpoint=model)
        assert str(caught.value).startswith(f"{path}: ")
    check_output_path(tmp_path / "y", source=source, checkpoint=model)
    check_output_path(Path("y"), source=source, checkpoint=tmp_path / "absent")


def test_folders_without_permission_are_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(MoeValueError, match=f"the directory {tmp_path} is not writable"):
        check_output_path(tmp_path / "y", source=tmp_path / "in", checkpoint=tmp_path / "model")


def test_a_path_with_a_nul_is_refused(tmp_path: Path) -> None:
    fine, bad = tmp_path / "fine", tmp_path / "a\0b"
    check_path(fine)
    for refused in (
        lambda: check_path(bad),
        lambda: read_input(bad, hidden_size=128, num_experts=3),
        lambda: check_output_path(bad, source=fine, checkpoint=fine),
        lambda: check_output_path(fine, source=bad, checkpoint=fine),
        lambda: check_output_path(fine, source=fine, checkpoint=bad),
    ):
        with pytest.raises(
            MoeValueError, match=f"a path cannot hold a NUL, this one has it at index {len(str(fine)) - 3}"
        ):
            refused()
