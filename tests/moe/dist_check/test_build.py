"""Holds a bound share to the layer that it is of, whatever lay in its scratch."""

from __future__ import annotations

import torch

from moe.dist_check.requests import request_of
from moe.samples import bits
from trellis_moe.dist_check.build import bind_share, compile_plans, plan_share, run_into
from trellis_moe.dist_check.samples import random_routes
from trellis_moe.parallel import ReduceSpec, tensor_grid


def test_shares_of_one_layer_add_up() -> None:
    request = request_of()
    routes = random_routes(request.source, 4, 2, dtype=torch.float16, device=request.device, seed=0)
    whole = bind_share(*plan_share(request))
    out = torch.empty(4, 128, dtype=torch.float16)
    wanted = run_into(whole, routes, out).clone()
    grid = tensor_grid(request.source, 2)
    total = torch.zeros(4, 128, dtype=torch.float64)
    for rank in range(2):
        share, plan = plan_share(request, grid, rank, ReduceSpec(collective="none"))
        total += run_into(bind_share(share, plan), routes, out).double()
    assert float((total - wanted.double()).norm() / wanted.double().norm()) <= 1e-3


def test_prepared_weights_and_scratch_are_taken_as_they_are() -> None:
    request = request_of()
    routes = random_routes(request.source, 3, 2, dtype=torch.float16, device=request.device, seed=0)
    share, plan = plan_share(request)
    first = bind_share(share, plan)
    scratch = torch.zeros(plan.required_nbytes(), dtype=torch.uint8)
    second = bind_share(share, plan, None, first.layer.experts, scratch)
    assert second.layer.experts is first.layer.experts
    outs = [run_into(bound, routes, torch.empty(3, 128, dtype=torch.float16)) for bound in (first, second)]
    assert bits(outs[0]) == bits(outs[1])
    assert scratch.any()
    assert compile_plans([plan]) == 0  # a CPU has no kernels
