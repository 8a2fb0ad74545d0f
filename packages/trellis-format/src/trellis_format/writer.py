"""Owns the writing of safetensors shards and of checkpoint directories: streamed, and complete or absent.

It must not know what a tensor means beyond its dtype, shape and bytes.  A shard is written under a temporary name and
renamed; a directory is filled under a temporary name beside its own and renamed, so that no reader meets half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.arrays import FileArray
from trellis_format.files.header import DTYPE_BITS, MAX_HEADER_BYTES, MAX_TENSORS
from trellis_format.files.strict_json import read_json

__all__ = [
    "CHUNK_BYTES",
    "Chunks",
    "OutputDirectory",
    "PlannedTensor",
    "deal_shards",
    "index_object",
    "of_array",
    "of_file",
    "shard_name",
    "write_json",
    "write_shard",
]

CHUNK_BYTES = 8 << 20
"""Bytes of tensor data that a writer holds at a time."""
_PARTIAL = ".partial"
_JOURNAL = ".trellis-progress.json"
_LOCK = ".trellis-lock"
_ALIGNMENT = 8  # header bytes are padded to it, so that tensor data starts aligned
_DTYPE_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64",
}  # fmt: skip

Chunks = Iterator["npt.NDArray[np.uint8] | int"]
"""Bytes of a tensor in order: `[bytes] uint8` arrays, and ints n for n zero bytes."""


def _no_chunks() -> Chunks:
    return iter(())


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is yet to be written.

    Attributes:
        name: its name.
        dtype: safetensors dtype.
        shape: axis lengths.
        chunks: makes an iterator over its bytes in order, `[bytes] uint8` arrays; an int n stands for n zero bytes,
            which become a hole where the file system has them.
        pieces: instead of `chunks`, makes an iterator over byte offsets and the `[bytes] uint8` arrays that lie there,
            in any order; what no piece covers is zeros.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Chunks] = _no_chunks
    pieces: Callable[[], Iterator[tuple[int, npt.NDArray[np.uint8]]]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def of_array(name: str, array: npt.NDArray[Any]) -> PlannedTensor:
    """Plan an array in memory.

    Raises:
        FormatTypeError: if safetensors has no dtype for it.
    """
    if array.dtype.name not in _DTYPE_NAMES:
        raise FormatTypeError(f"dtype {array.dtype} has no safetensors dtype", tensor=name)

    def chunks() -> Chunks:
        if array.size:
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            yield little.reshape(-1).view(np.uint8)

    return PlannedTensor(name, _DTYPE_NAMES[array.dtype.name], array.shape, chunks)


def of_file(tensor: FileArray, name: str | None = None) -> PlannedTensor:
    """Plan a copy of a tensor of a shard, byte for byte and in pieces of `CHUNK_BYTES`.

    Args:
        tensor: the tensor; its dtype may be one that numpy lacks.
        name: another name for the copy.
    """

    def chunks() -> Chunks:
        yield from tensor.read_chunks(CHUNK_BYTES)

    return PlannedTensor(name or tensor.entry.name, tensor.entry.dtype, tensor.shape, chunks)


def write_shard(
    path: Path,
    tensors: Sequence[PlannedTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Write one shard under a temporary name and rename it.

    Args:
        path: the file.
        tensors: what it holds; they are laid out by falling element size, then in the given order.
        metadata: strings for `__metadata__`.
        on_bytes: told of each piece of tensor data that was written, in bytes.

    Returns:
        Bytes of the file.

    Raises:
        FormatValueError: if two tensors have one name, the header would exceed the bound of readers, a plan yields
            more or fewer bytes than its shape needs, or the file cannot be written.
    """
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    header = _header(ordered, metadata, path)
    size = len(header) + sum(tensor.nbytes for tensor in ordered)
    with _renamed(path) as stream:
        stream.write(header)
        for tensor in ordered:
            _write_tensor(stream, tensor, path, on_bytes or (lambda _: None))
        stream.truncate(size)
    return size


def write_json(path: Path, value: object) -> None:
    """Write an indented JSON file under a temporary name and rename it.

    Raises:
        FormatValueError: if it cannot be written.
    """
    with _renamed(path) as stream:
        stream.write((json.dumps(value, indent=2) + "\n").encode())


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[BinaryIO]:
    """A file under a temporary name, which gets its own when it is whole and on the disk, and goes when it is not."""
    temporary = path.with_name(path.name + _PARTIAL)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    except OSError as error:
        raise FormatValueError(f"cannot be written: {error.strerror or error}", file=path) from error
    finally:
        with contextlib.suppress(OSError):  # of a path below a file, an error already
            temporary.unlink(missing_ok=True)


def _write_tensor(stream: BinaryIO, tensor: PlannedTensor, path: Path, on_bytes: Callable[[int], None]) -> None:
    if tensor.pieces is None:
        for chunk in _exact(tensor, path):
            if isinstance(chunk, int):
                stream.seek(chunk, os.SEEK_CUR)
            else:
                stream.write(chunk.data)
            on_bytes(chunk if isinstance(chunk, int) else chunk.nbytes)
        return
    stream.flush()
    base, left = stream.tell(), tensor.nbytes
    for offset, piece in tensor.pieces():
        left -= piece.nbytes
        if left < 0 or not 0 <= offset <= tensor.nbytes - piece.nbytes:
            raise FormatValueError(
                f"the plan has {piece.nbytes} bytes at {offset}, beyond the {tensor.nbytes} bytes of {tensor.dtype} "
                f"{list(tensor.shape)} or twice",
                file=path,
                tensor=tensor.name,
            )
        _write_at(stream.fileno(), piece, base + offset)
        on_bytes(piece.nbytes)
    on_bytes(left)
    stream.seek(base + tensor.nbytes)


def _write_at(descriptor: int, piece: npt.NDArray[np.uint8], offset: int) -> None:
    done = 0
    while done < piece.nbytes:  # a write may stop short, at a signal or at 2 GiB
        done += os.pwrite(descriptor, piece[done:].data, offset + done)


def _header(tensors: Sequence[PlannedTensor], metadata: Mapping[str, str] | None, path: Path) -> bytes:
    if len(tensors) > MAX_TENSORS:
        raise FormatValueError(
            f"{len(tensors)} tensors exceed the bound of {MAX_TENSORS} of a shard; write more shards", file=path
        )
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        if tensor.name in header:
            raise FormatValueError("two tensors of one shard have this name", file=path, tensor=tensor.name)
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    if len(encoded) > MAX_HEADER_BYTES:
        raise FormatValueError(
            f"header of {len(encoded)} bytes exceeds the bound of {MAX_HEADER_BYTES}; write more shards", file=path
        )
    return len(encoded).to_bytes(8, "little") + encoded


def _exact(tensor: PlannedTensor, path: Path) -> Chunks:
    done = 0
    for chunk in tensor.chunks():
        done += chunk if isinstance(chunk, int) else chunk.nbytes
        if done > tensor.nbytes:
            break
        yield chunk
    if done != tensor.nbytes:
        raise FormatValueError(
            f"{tensor.dtype} {list(tensor.shape)} needs {tensor.nbytes} bytes, the plan gave {done} or more",
            file=path,
            tensor=tensor.name,
        )


def shard_name(number: int, count: int) -> str:
    """File name of shard `number` (from 0) of `count`."""
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def deal_shards(tensors: Sequence[PlannedTensor], count: int) -> list[list[PlannedTensor]]:
    """Deal tensors to at most `count` shards in runs of about equal bytes; no shard is empty.

    Raises:
        FormatValueError: if `count` is not positive.
    """
    if count < 1:
        raise FormatValueError(f"{count} shards: at least 1 is needed")
    share = sum(tensor.nbytes for tensor in tensors) / count
    dealt: list[list[PlannedTensor]] = [[]]
    done = 0
    for tensor in tensors:
        if dealt[-1] and len(dealt) < count and done >= share * len(dealt):
            dealt.append([])
        dealt[-1].append(tensor)
        done += tensor.nbytes
    return dealt


def index_object(shards: Mapping[str, Iterable[PlannedTensor]]) -> dict[str, Any]:
    """The JSON object of the index of shards by file name."""
    return {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards.values() for tensor in shard)},
        "weight_map": {tensor.name: name for name, shard in shards.items() for tensor in shard},
    }


class OutputDirectory:
    """A directory that appears when it is complete.

    As a context manager it makes (or finds) a directory `.NAME.partial` beside its own and holds a lock on it; leaving
    without an error renames it.  After an error it stays if `resumable`, and the next writer of the same `fingerprint`
    finds the files that were complete; otherwise it is removed.

    Args:
        path: the directory; it must not exist, or be empty.
        fingerprint: what the content follows from; a partial directory of another one is refused.
        resumable: whether to keep a partial directory after an error.

    Raises:
        FormatValueError: if the path is the root; on entering, if the directory is there already, another process
            writes it, what has the name of the partial directory is no directory (a link included) or holds files but
            no journal of this writer, a partial directory has another fingerprint, or something cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, fingerprint: str, resumable: bool = False) -> None:
        self.path = Path(os.path.abspath(path))
        if not self.path.name:
            raise FormatValueError("a checkpoint cannot be written to the root directory", file=self.path)
        self.partial = self.path.with_name(f".{self.path.name}{_PARTIAL}")
        self._fingerprint = fingerprint
        self._resumable = resumable
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self._reclaim()
            taken = self.path.is_symlink() or (self.path.exists() and not self.path.is_dir())
            if taken or (self.path.exists() and any(self.path.iterdir())):
                text = "already exists; name a directory that does not, or an empty one"
                raise FormatValueError(text, file=self.path)
            self._make_partial()
            self._take_lock(self.partial)
            self._check_journal()
        except OSError as error:
            self._drop_lock()
            raise FormatValueError(f"cannot be written: {error.strerror or error}", file=self.path) from error
        except FormatValueError:
            self._drop_lock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.partial.rename(self.path)
                for name in (_LOCK, _JOURNAL):  # the journal last: until then the next writer takes it up again
                    (self.path / name).unlink()
            elif not self._resumable:
                shutil.rmtree(self.partial, ignore_errors=True)
        except OSError as failure:
            raise FormatValueError(f"cannot be written: {failure.strerror or failure}", file=self.path) from failure
        finally:
            self._drop_lock()

    def file(self, name: str) -> Path:
        """Path at which a file of the directory is written."""
        return self.partial / name

    def has(self, name: str) -> bool:
        """Whether a file is complete: files get their own name when they are."""
        return self.file(name).exists()

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file under a temporary name and rename it.

        Raises:
            FormatValueError: if it cannot be written.
        """
        write_json(self.file(name), value)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a small file under a temporary name and rename it.

        Raises:
            FormatValueError: if it cannot be written.
        """
        with _renamed(self.file(name)) as stream:
            stream.write(data)

    def _reclaim(self) -> None:
        """Take back a directory of the same content whose writer was killed between its renaming and its last step."""
        journal = self.path / _JOURNAL
        if self.path.is_symlink() or self.partial.exists() or journal.is_symlink() or not journal.is_file():
            return
        if read_json(journal) == {"fingerprint": self._fingerprint}:
            self._take_lock(self.path)
            self.path.rename(self.partial)
            self._drop_lock()

    def _make_partial(self) -> None:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.partial.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(self.partial.lstat().st_mode):  # what a link leads to is not this writer's to empty
                text = f"{self.partial} is in the way: it must be a directory, not a link or a file; remove it"
                raise FormatValueError(text, file=self.path) from None

    def _take_lock(self, directory: Path) -> None:
        self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FormatValueError("another process is writing it", file=self.path) from error

    def _drop_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_journal(self) -> None:
        journal = self.file(_JOURNAL)
        left = sorted(set(os.listdir(self.partial)) - {_LOCK, f"{_JOURNAL}{_PARTIAL}"})
        if left and (journal.is_symlink() or not journal.is_file()):
            raise FormatValueError(
                f"{self.partial} holds {left[0]!r} but no journal of a conversion, so that it is not known to be one's "
                "own; remove it to start afresh",
                file=self.path,
            )
        if left and not self._resumable:  # what a killed writer left is of no use
            self._clear(left)
        if journal.exists():
            found = read_json(journal)
            if found != {"fingerprint": self._fingerprint}:
                raise FormatValueError(
                    f"{self.partial} is left from another conversion; remove it to start afresh", file=self.path
                )
        else:
            self.write_json(_JOURNAL, {"fingerprint": self._fingerprint})
            self._sync()  # a file that is complete must never lie beside no journal

    def _clear(self, left: Sequence[str]) -> None:
        for name in left:
            if stat.S_ISDIR(self.file(name).lstat().st_mode):
                raise FormatValueError(
                    f"{self.partial} holds a folder {name!r}, which no writer makes; remove it to start afresh",
                    file=self.path,
                )
        for name in left:
            self.file(name).unlink()

    def _sync(self) -> None:
        descriptor = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
