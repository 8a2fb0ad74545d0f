"""Owns the collectives of a group of ranks, and what is said when one fails.  It must not know layers.

Every call is in the order of the current stream and waits for nothing on the host, so that a CUDA graph can hold it;
`await_device` is for the host to find out whether the ranks are still there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trellis_moe.errors import MoeDistributedError, MoeValueError

__all__ = ["Pending", "Ranks", "await_device"]

_POLL_SECONDS = 0.001


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Make the current stream, or on a CPU the caller, wait for the result."""
        ...


class Ranks:
    """A process group as this package uses it.

    Attributes:
        group: the process group.
        size: its ranks.
        rank: of this process in it.

    Args:
        group: of `torch.distributed`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._is_gloo = dist.get_backend(group) == "gloo"

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Begin to add a tensor up over the ranks, in place; every rank gets the same bits.

        Args:
            tensor: contiguous; nothing may touch it before `Pending.wait`.

        Raises:
            MoeDistributedError: if the backend refuses or a peer is gone.
        """
        with self._told("all-reduce", tensor):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None  # async_op
        return _Told(self, work, "all-reduce", tensor)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Add a tensor up over the ranks and keep this rank's part of its first axis.

        Args:
            out: `[n / size, ...]`, contiguous.
            tensor: `[n, ...]`, contiguous; what it holds afterwards is undefined.

        Raises:
            MoeDistributedError: as `all_reduce`.
        """
        with self._told("reduce-scatter", tensor):
            if not self._is_gloo:
                dist.reduce_scatter_tensor(out, tensor, group=self.group)
                return
            dist.all_reduce(tensor, group=self.group)  # gloo has no reduce-scatter of tensors
            out.copy_(tensor.tensor_split(self.size)[self.rank])

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put the ranks' tensors one after the other.

        Args:
            out: `[n * size, ...]`, contiguous.
            tensor: `[n, ...]`, contiguous, apart from `out`.

        Raises:
            MoeDistributedError: as `all_reduce`.
        """
        with self._told("all-gather", tensor):
            if not (self._is_gloo and tensor.is_cuda):
                dist.all_gather_into_tensor(out, tensor, group=self.group)
                return
            out.zero_().tensor_split(self.size)[self.rank].copy_(tensor)  # gloo gathers no CUDA tensors
            dist.all_reduce(out.view(torch.uint8), group=self.group)

    def exchange(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Give each rank its part of a tensor's first axis.

        Args:
            out: `[n, ...]`, contiguous: this rank's part of every rank's tensor, one rank after the other.
            tensor: `[n, ...]`, contiguous, apart from `out`; n is a multiple of the ranks.

        Raises:
            MoeDistributedError: as `all_reduce`.
        """
        with self._told("all-to-all", tensor):
            if not (self._is_gloo and tensor.is_cuda):
                dist.all_to_all_single(out, tensor, group=self.group)
                return
            everyone = out.new_zeros((self.size, *tensor.shape))  # gloo exchanges no CUDA tensors
            everyone[self.rank].copy_(tensor)
            dist.all_reduce(everyone.view(torch.uint8), group=self.group)
            out.copy_(torch.cat([each.tensor_split(self.size)[self.rank] for each in everyone]))

    def check_same(self, what: str, value: object) -> None:
        """Accept a value that all ranks have; ranks that disagree would wait for each other for ever.

        Args:
            what: the value's name, for the message.
            value: with a repr that says all of it.

        Raises:
            MoeDistributedError: if a rank is gone.
            MoeValueError: if another rank has another value; names both ranks and both values.
        """
        found: list[str] = [""] * self.size
        with self._told(f"comparing {what}"):
            dist.all_gather_object(found, repr(value), group=self.group)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise MoeValueError(f"{what}: rank 0 has {found[0]}, rank {rank} has {other}; all ranks need the same")

    @contextmanager
    def _told(self, what: str, tensor: torch.Tensor | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises, whichever the backend
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            of = "" if tensor is None else f" of {list(tensor.shape)} {tensor.dtype}"
            raise MoeDistributedError(f"rank {self.rank} of {self.size}: {what}{of} failed: {reason}") from error


class _Told:
    """A collective under way whose failure names it."""

    def __init__(self, ranks: Ranks, work: dist.Work, what: str, tensor: torch.Tensor) -> None:
        self._ranks, self._work, self._what, self._tensor = ranks, work, what, tensor

    def wait(self) -> object:
        with self._ranks._told(self._what, self._tensor):
            return self._work.wait()


def await_device(device: torch.device, *, seconds: float, what: str, ranks: Ranks | None = None) -> None:
    """Wait on the host for all work queued on a device's current stream, but not for ever.

    A peer that died leaves a CUDA collective waiting on the device; this is where the host finds out.

    Args:
        device: of the work; one that is not CUDA has none queued.
        seconds: longest wait.
        what: the work, for the message.
        ranks: those that take part, for the message.

    Raises:
        MoeDistributedError: if the work does not end in time, or failed.
    """
    if device.type != "cuda":
        return
    who = "this process" if ranks is None else f"rank {ranks.rank} of {ranks.size}"
    end: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    end.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + seconds
    try:
        while not end.query():
            if time.monotonic() > deadline:
                raise MoeDistributedError(
                    f"{who}: {what} did not end within {seconds:g} s; a rank is gone, or runs other collectives"
                )
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        if isinstance(error, MoeDistributedError):
            raise
        raise MoeDistributedError(f"{who}: {what} failed: {str(error).strip().splitlines()[0]}") from error
