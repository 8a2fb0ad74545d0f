"""Holds the plan of a preparation to the bytes that it promises."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from prep.samples import extent_of, random_layer
from trellis_format.extent import TrellisExtent
from trellis_format.rate_table import RateTable
from trellis_format.source import ExpertGeometry
from trellis_prep import (
    PrepTypeError,
    PrepValueError,
    TrellisStaging,
    plan_layout,
    plan_preparation,
)
from trellis_prep.plan import LONG_RUN


@pytest.mark.parametrize("max_bytes", [200_000, 1 << 20, 1 << 26])
def test_owners_are_all_bytes_and_the_ring_fits(max_bytes: int) -> None:
    source, _ = random_layer(experts=6, biased=True)
    plan = plan_preparation(source, extent=extent_of(384, 0, 2), staging=TrellisStaging(max_bytes=max_bytes))
    assert sum(plan.owners.values()) == plan.layout.total_bytes
    assert plan.owners == {"codes": plan.layout.code_bytes} | plan.layout.table_bytes
    assert 0 < plan.host_bytes <= max_bytes
    assert plan.device_temporary_bytes == 0
    assert sum(batch.nbytes for batch in plan.batches) == plan.layout.code_bytes


def test_kimi_k3_share_of_64_mib() -> None:
    geometry = ExpertGeometry(
        num_experts=896,
        hidden_size=3584,
        intermediate_size=3072,
        padded_hidden_size=3584,
        padded_intermediate_size=3072,
    )
    source = dataclasses.replace(
        random_layer(codebook="mcg", rates=("2",))[0],
        geometry=geometry,
        rates=RateTable(((4,),)),
        extent=TrellisExtent.whole(3072),
    )
    plan = plan_preparation(source, extent=extent_of(3072, 0, 3), staging=TrellisStaging(readers=1))
    assert (plan.slots, plan.slot_bytes, len(plan.batches)) == (2, 32 * 1_032_192, 28)
    assert plan.host_bytes == 66_060_288
    plan = plan_preparation(source, extent=extent_of(3072, 0, 3), staging=TrellisStaging(readers=16))
    assert (plan.slots, plan.slot_bytes, len(plan.batches)) == (32, 2 * 1_032_192, 448)


def test_readers_are_as_said_or_as_runs_and_cores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = random_layer(hidden=1024)
    part, whole = extent_of(384, 0, 1), source.extent
    assert plan_layout(source, part).run_bytes() == 8 * 32, "a row of tiles of K = 1 in 128 channels"
    assert plan_layout(source, whole).run_bytes() == 1024 * 384 // 8, "a whole linear of K = 1"
    for cores, ring in itertools.product((1, 2, 64), (True, False)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr("trellis_prep.plan.have_ring", lambda ring=ring: ring)
        monkeypatch.setattr("trellis_prep.plan.have_pollers", lambda: False)
        monkeypatch.setattr("trellis_prep.plan.have_workers", lambda: False)
        for rate, most, few in (("8", 4, 2), ("1", 16 if ring else 1, 8 if ring else 1)):
            wide, _ = random_layer(hidden=1024, experts=60 if rate == "8" else 240, rates=(rate,))
            assert (plan_layout(wide).run_bytes() < LONG_RUN) == (rate == "1")
            assert plan_preparation(wide, staging=TrellisStaging(max_bytes=33 << 20)).readers == min(cores, most)
            assert plan_preparation(wide, staging=TrellisStaging(max_bytes=16 << 20)).readers == min(cores, few)
        bounds = TrellisStaging(max_bytes=33 << 20)
        shared = plan_preparation(random_layer(hidden=1024, experts=240)[0], extent=part, staging=bounds)
        assert shared.readers == (min(cores, 16) if ring else 1), "a share has short runs"
        assert plan_preparation(source, extent=part).readers == 1, "there is one batch"
        few = plan_preparation(source, extent=part, staging=TrellisStaging(readers=3, max_bytes=400_000))
        assert few.readers == 3
        assert few.slots == 6


@pytest.mark.parametrize("rate", ["8", "1"])
def test_the_kernel_fills_slots_as_cores_runs_and_codes_allow(rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, _ = random_layer(hidden=1024, experts=60 if rate == "8" else 800, rates=(rate,))
    assert plan_layout(wide).code_bytes > 32 << 20
    for cores, have in itertools.product((1, 3, 4, 8, 16, 64), (True, False)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr("trellis_prep.plan.have_pollers", lambda have=have: have)
        monkeypatch.setattr("trellis_prep.plan.have_workers", lambda have=have: have)
        pollers = {4: 2, 8: 4, 16: 8, 64: 8}.get(cores, 0) if have else 0
        plan = plan_preparation(wide)
        assert plan.workers == (rate == "8" and pollers > 0)
        assert plan.pollers == (0 if rate == "8" else pollers), "for short runs"
        for other in (plan_preparation(wide, staging=TrellisStaging(readers=2)), plan_preparation(random_layer()[0])):
            assert (other.pollers, other.workers) == (0, False), "readers were asked for, or it is not worth it"
        if pollers:
            assert (plan.slots, plan.readers) == (8, 4)
            small = plan_preparation(wide, staging=TrellisStaging(max_bytes=16 << 20))
            assert (small.slots, small.readers) == (5, 2), "slots of 3 MiB and more"
            least = plan_preparation(wide, staging=TrellisStaging(max_bytes=3 << 20))
            assert (least.slots, least.readers) == (2, 1)


def test_empty_share_has_slots_for_its_tables() -> None:
    source, _ = random_layer()
    plan = plan_preparation(source, extent=extent_of(384, 3, 0), staging=TrellisStaging(max_bytes=1000))
    assert plan.batches == ()
    assert 0 < plan.host_bytes <= 1000


def test_defaults_are_the_whole_source_and_64_mib() -> None:
    source, _ = random_layer()
    plan = plan_preparation(source)
    assert plan.layout.extent == source.extent
    assert plan.staging == TrellisStaging()
    assert plan.layout.total_bytes == plan_layout(source).total_bytes


def test_what_cannot_be_planned_is_refused() -> None:
    source, _ = random_layer()
    need = max(source.expert_code_bytes(expert) for expert in range(3))
    with pytest.raises(PrepValueError, match=rf"{need - 1} bytes is insufficient: expert \d takes {need} bytes"):
        plan_preparation(source, staging=TrellisStaging(max_bytes=need - 1))
    with pytest.raises(PrepTypeError, match="staging must be a TrellisStaging, got int"):
        plan_preparation(source, staging=1 << 20)  # type: ignore[arg-type]
    with pytest.raises(PrepTypeError, match="extent must be a TrellisExtent, got int"):
        plan_preparation(source, extent=128)  # type: ignore[arg-type]
