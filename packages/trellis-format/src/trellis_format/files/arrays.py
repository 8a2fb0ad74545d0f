"""Owns arrays that may lie in memory or in a file, read by position and in pieces.  It must not map files into memory.

Reads are positional (`pread`), so that a reader holds no more than what it asked for, and threads can share a file.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.header import ShardHeader, TensorEntry
from trellis_format.files.uring import thread_ring

__all__ = ["ArrayView", "FileArray", "FileRuns", "MemoryArray", "ShardReader"]

MANY_BYTES = 1 << 20
"""Bytes from which a read is shared out over the kernel's workers."""
_NUMPY_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2",
    "I32": "<i4", "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8",
}  # fmt: skip


class ArrayView(ABC):
    """An array that can be read whole or as a box.

    Attributes:
        shape: axis lengths.
        dtype: element type.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def read(self) -> npt.NDArray[Any]:
        """The whole array; in memory it is the same storage, from a file it is a fresh array."""

    @abstractmethod
    def read_box(self, box: tuple[slice, ...], out: npt.NDArray[np.uint8]) -> None:
        """Read a box into a buffer.

        Args:
            box: one slice of step 1 per axis.
            out: `[bytes] uint8`, contiguous, exactly as large as the box; filled in row-major order.

        Raises:
            FormatValueError: if the box is outside the array, the buffer has another size, or the file is short.
        """

    def runs(self, box: tuple[slice, ...]) -> FileRuns | None:
        """Where the bytes of a box lie in a file, and where they go in the order of `read_box`; None if not told.

        Raises:
            FormatValueError: if the box is outside the array.
        """
        self.box_shape(box)
        return None

    def box_shape(self, box: tuple[slice, ...]) -> tuple[int, ...]:
        """Axis lengths of a box.

        Raises:
            FormatValueError: if the box does not fit the array.
        """
        if len(box) != len(self.shape):
            raise FormatValueError(f"box has {len(box)} axes, the array {len(self.shape)}")
        lengths = []
        for part, size in zip(box, self.shape, strict=True):
            start = 0 if part.start is None else part.start
            stop = size if part.stop is None else part.stop
            if part.step not in (None, 1) or not 0 <= start <= stop <= size:
                raise FormatValueError(f"box {part} is outside an axis of {size}")
            lengths.append(stop - start)
        return tuple(lengths)

    def _check_out(self, box: tuple[slice, ...], out: npt.NDArray[np.uint8]) -> tuple[int, ...]:
        lengths = self.box_shape(box)
        nbytes = math.prod(lengths) * self.dtype.itemsize
        if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous or out.size != nbytes:
            raise FormatValueError(f"buffer must be {nbytes} contiguous uint8, got {out.dtype} {out.shape}")
        return lengths


class MemoryArray(ArrayView):
    """An array in memory; `read` returns it without a copy."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def read(self) -> npt.NDArray[Any]:
        """The array itself."""
        return self._array

    def read_box(self, box: tuple[slice, ...], out: npt.NDArray[np.uint8]) -> None:
        """Copy a box into a buffer; see `ArrayView.read_box`."""
        lengths = self._check_out(box, out)
        if out.size:
            out.view(self.dtype).reshape(lengths)[...] = self._array[box]


class FileRuns(NamedTuple):
    """Runs of one length in a file, that make up a part of a tensor one after the other.

    Attributes:
        reader: of the file.
        begin: byte of the file that places count from.
        places: `[runs] int64`, first byte of each run; not to be written.
        length: bytes of a run.
        tensor: named in errors.
        scatter: `[runs, segments] int64`, where the segments of each run, all of one length, go in the part; None where
            runs follow each other.
    """

    reader: ShardReader
    begin: int
    places: npt.NDArray[np.int64]
    length: int
    tensor: str
    scatter: npt.NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return len(self.places) * self.length


class ShardReader:
    """Positional reads from one shard, opened at the first read and checked to be the file that the header came from.

    Attributes:
        header: the checked header.
        bytes_read: bytes that were read so far.
    """

    def __init__(self, header: ShardHeader) -> None:
        self.header = header
        self.bytes_read = 0
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def read_into(self, offset: int, out: memoryview, tensor: str) -> None:
        """Fill `out` from byte `offset` of the file.

        Raises:
            FormatValueError: if the file was replaced, changed or truncated since its header was read, or on an I/O
                error.
        """
        self.read_runs((offset,), len(out), out, tensor)

    def read_runs(self, offsets: Iterable[int], length: int, out: memoryview, tensor: str) -> None:
        """Fill `out` with runs of one length, one after the other, one positional read for each.

        The loop is kept this tight because the runs of a share of gate or up are a few KiB, so that what surrounds a
        read would cost more than the read.

        Args:
            offsets: first byte of each run in the file.
            length: bytes of a run.
            out: as many bytes as all runs have.
            tensor: named in errors.

        Raises:
            FormatValueError: as `read_into`.
        """
        descriptor, read, offset, done = self.descriptor(), os.preadv, 0, 0
        try:
            if len(out) >= MANY_BYTES and (ring := thread_ring()) is not None:
                places = np.fromiter(offsets, dtype=np.int64)
                done = ring.read(descriptor, places, length, np.frombuffer(out, dtype=np.uint8)) // length * length
                offsets = places[done // length :].tolist()  # read again what it did not finish, to be told why
            for offset in offsets:
                if length and read(descriptor, (part := out[done : done + length],), offset) != length:
                    self._continue(descriptor, offset, part, tensor)
                done += length
            same = self.header.identity.is_of(os.fstat(descriptor))
        except OSError as error:
            raise self._refuse(f"cannot be read at byte {offset}: {error.strerror or error}", tensor) from error
        if not same:
            raise self._refuse("the file changed while it was read", tensor)
        with self._lock:
            self.bytes_read += done

    def _continue(self, descriptor: int, offset: int, out: memoryview, tensor: str) -> None:
        """Read a run again in as many reads as it takes."""
        done = 0
        while done < len(out):
            count = os.preadv(descriptor, (out[done:],), offset + done)
            if count == 0:
                raise self._refuse(f"truncated: {len(out)} bytes wanted at byte {offset}, {done} read", tensor)
            done += count

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._descriptor = self._finalizer = None

    def count_if_unchanged(self, nbytes: int) -> bool:
        """Count bytes that were read through `descriptor`, unless the file changed since its header was read."""
        try:
            same = self.header.identity.is_of(os.fstat(self.descriptor()))
        except OSError:
            same = False
        if same:
            with self._lock:
                self.bytes_read += nbytes
        return same

    def descriptor(self) -> int:
        """The open file, for positional reads; `count_if_unchanged` belongs after them.

        Raises:
            FormatValueError: if the file cannot be opened, or is not the one that the header came from.
        """
        with self._lock:
            if self._descriptor is None:
                try:
                    descriptor = os.open(self.header.path, os.O_RDONLY)
                except OSError as error:
                    raise self._refuse(f"cannot be opened: {error.strerror or error}", None) from error
                self._finalizer = weakref.finalize(self, os.close, descriptor)
                if not self.header.identity.is_of(os.fstat(descriptor)):
                    self._finalizer()
                    self._finalizer = None
                    raise self._refuse("the file changed after its header was read", None)
                self._descriptor = descriptor
            return self._descriptor

    def _refuse(self, message: str, tensor: str | None) -> FormatValueError:
        return FormatValueError(message, file=self.header.path, tensor=tensor)


class FileArray(ArrayView):
    """A tensor of a shard, read by position.

    A tensor whose dtype numpy lacks, such as bfloat16, can be described but not read; `dtype` is then void.

    Attributes:
        reader: of its shard.
        entry: its place there.
    """

    def __init__(self, reader: ShardReader, entry: TensorEntry) -> None:
        self.entry = entry
        self.shape = entry.shape
        self.dtype = np.dtype(_NUMPY_DTYPES.get(entry.dtype, "V1"))
        self.reader = reader

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    @property
    def file(self) -> str:
        """Path of the shard."""
        return str(self.reader.header.path)

    def read(self) -> npt.NDArray[Any]:
        """The whole tensor, freshly read.

        Raises:
            FormatTypeError: if numpy has no dtype for the tensor's.
            FormatValueError: if the file changed or is short.
        """
        self._check_dtype()
        flat = np.empty(self.nbytes, dtype=np.uint8)
        self.reader.read_into(self.entry.begin, flat.data, self.entry.name)
        return flat.view(self.dtype).reshape(self.shape)

    def read_box(self, box: tuple[slice, ...], out: npt.NDArray[np.uint8]) -> None:
        """Read a box into a buffer, one positional read per contiguous run; see `ArrayView.read_box`.

        Raises:
            FormatTypeError: if numpy has no dtype for the tensor's.
        """
        self._check_dtype()
        self._check_out(box, out)
        if not out.size:
            return
        places, length = _places(self.shape, self.dtype.itemsize, tuple((part.start, part.stop) for part in box))
        begin, count = self.entry.begin, len(places)
        offsets = (begin + int(places[0]),) if count == 1 else (places + begin).tolist()
        self.reader.read_runs(offsets, length, out.data, self.entry.name)

    def runs(self, box: tuple[slice, ...]) -> FileRuns:
        """Where the bytes of a box lie; see `ArrayView.runs`.

        Raises:
            FormatTypeError: if numpy has no dtype for the tensor's.
        """
        self._check_dtype()
        self.box_shape(box)
        places, length = _places(self.shape, self.dtype.itemsize, tuple((part.start, part.stop) for part in box))
        return FileRuns(self.reader, self.entry.begin, places, length, self.entry.name)

    def read_chunks(self, size: int) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of the tensor in order, in fresh arrays of at most `size` bytes; any dtype.

        Raises:
            FormatValueError: if the file changed or is short.
        """
        for begin in range(0, self.nbytes, size):
            chunk = np.empty(min(size, self.nbytes - begin), dtype=np.uint8)
            self.reader.read_into(self.entry.begin + begin, chunk.data, self.entry.name)
            yield chunk

    def _check_dtype(self) -> None:
        if self.entry.dtype not in _NUMPY_DTYPES:
            raise FormatTypeError(
                f"dtype {self.entry.dtype} has no numpy type; it can be described, not read",
                file=self.file,
                tensor=self.entry.name,
            )


@lru_cache(maxsize=64)
def _places(
    shape: tuple[int, ...], itemsize: int, box: tuple[tuple[int | None, int | None], ...]
) -> tuple[npt.NDArray[np.int64], int]:
    """First bytes of the contiguous runs of a box that fits, in row-major order, and the bytes of one.

    Boxes are kept since the same one is read of every expert.
    """
    starts = [start or 0 for start, _ in box]
    lengths = [
        (size if stop is None else stop) - start for start, (_, stop), size in zip(starts, box, shape, strict=True)
    ]
    axis, run = len(shape), itemsize
    while axis and lengths[axis - 1] == shape[axis - 1]:  # trailing whole axes are contiguous
        axis -= 1
        run *= shape[axis]
    places, stride = np.zeros(int(0 not in lengths), dtype=np.int64), run
    if axis:
        axis -= 1
        run *= lengths[axis]
        for index in range(axis, -1, -1):
            count = 1 if index == axis else lengths[index]
            rows = np.arange(starts[index], starts[index] + count, dtype=np.int64)
            places = (rows[:, None] * stride + places).reshape(-1)
            stride *= shape[index]
    places.setflags(write=False)
    return places, run
