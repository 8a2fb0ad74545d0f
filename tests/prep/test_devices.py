"""Holds destinations to what is there, and memory that cannot be had to its name and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prep.samples import random_layer
from trellis_prep import PrepMemoryError, PrepStateError, PrepTypeError, PrepValueError, plan_layout
from trellis_prep.devices import allocate, resolve_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", [None, "cpu", CPU, "cpu:0"])
def test_cpu_has_many_names(device: Any) -> None:
    assert resolve_device(device) == CPU


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("xpu9000", "not a device"),
        ("meta", "must be cpu or cuda, got meta"),
        ("cuda:99", "cuda:99 is not there"),
        ("cpu:7", "cpu is one device"),
    ],
)
def test_device_that_cannot_be_used_is_refused(device: str, message: str) -> None:
    with pytest.raises(PrepValueError, match=message):
        resolve_device(device)


@pytest.mark.parametrize("device", [0, 1.5, b"cpu", ["cpu"]])
def test_device_is_a_name(device: Any) -> None:
    with pytest.raises(PrepTypeError, match=r"must be a string or torch\.device, got"):
        resolve_device(device)


def test_tensors_are_those_of_the_layout() -> None:
    layout = plan_layout(random_layer(biased=True)[0])
    tensors = allocate(layout, CPU)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        spec.name: spec.shape for spec in layout.tensors
    }
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) == layout.total_bytes
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors.values())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nlong advice"), MemoryError("full")])
def test_memory_that_runs_out_names_what_for(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = plan_layout(random_layer()[0])
    real, calls = torch.empty, []

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 3:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    spec = layout.tensors[2]
    with pytest.raises(PrepMemoryError, match=rf"{spec.name} of {spec.nbytes} bytes cannot be had on cpu, of ") as hit:
        allocate(layout, CPU)
    assert "long advice" not in str(hit.value)
    assert hit.value.__cause__ is error


@pytest.mark.gpu
def test_cuda_without_a_number_is_the_current_one() -> None:
    assert resolve_device("cuda") == torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_capture_is_refused() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(PrepStateError, match="while a CUDA graph is captured"):
        resolve_device("cuda")
