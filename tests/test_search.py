"""The adapters between MetaSchedule and a family, and the search itself; nothing is built here.

The rows named are of BUGS.md, section I.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from toy_family import ToyForward
from tuner_stubs import DEVICE, PROBLEM, by_block, offered  # noqa: F401

from fa2tvm.device import gpu as named_gpu
from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import SCHEDULES
from fa2tvm.tune.features import columns
from fa2tvm.tune.search import Search
from fa2tvm.tune.space import PREFIX, Space


def test_annotations_carry_the_decisions(offer: Callable[..., None]) -> None:
    from tvm.s_tir import Schedule as Trace

    offer(block_kv=(1, 2, 4), order=("ij", "ji"))
    space = Space.of(PROBLEM, DEVICE, "toy")
    assert space.size == 6
    wanted = ToyForward(block_kv=4, order="ji")
    sch = Trace(space.workload())
    space.apply(sch, wanted)
    annotations = sch.get(sch.get_sblock("root")).annotations
    assert {key for key in annotations if key.startswith(PREFIX)} == {
        "fa2tvm.block_kv",
        "fa2tvm.order",
        "fa2tvm.fault",
    }
    assert space.read(sch) == wanted
    with pytest.raises(InfeasibleSchedule, match="block_kv is 8"):
        space.apply(Trace(space.workload()), ToyForward(block_kv=8))


def test_trace_reapplies_to_a_fresh_workload(offer: Callable[..., None]) -> None:
    """BUGS I13 (TVM #16288): the stored trace is the candidate, also for another process."""
    import tvm_ffi
    from tvm.s_tir import Schedule as Trace

    offer(block_kv=(1, 2, 4), order=("ij", "ji"))
    space = Space.of(PROBLEM, DEVICE, "toy")
    sch = Trace(space.workload())
    space.sample(sch)
    again = Trace(Space.of(PROBLEM, DEVICE, "toy").workload())
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    assert space.read(again) == space.read(sch)
    assert tvm_ffi.structural_hash(again.mod) == tvm_ffi.structural_hash(sch.mod)


def test_workload_is_the_problem() -> None:
    import tvm_ffi

    def digest(problem: Problem) -> int:
        return int(tvm_ffi.structural_hash(Space.of(problem, DEVICE, "toy").workload()))

    other = Problem(PROBLEM.variant, Shape(1, 2, 1, 65, 64))
    assert digest(PROBLEM) == digest(PROBLEM) != digest(other)


def test_default_is_always_a_point_of_the_space(offer: Callable[..., None]) -> None:
    offer(block_kv=(2, 4))
    assert Space.of(PROBLEM, DEVICE, "toy").choices["block_kv"] == (1, 2, 4)


def test_search_finds_every_feasible_point_and_no_other(offer: Callable[..., None]) -> None:
    offer(block_kv=(1, 2, 4, 8, 128, 256), order=("ij", "ji"))
    search = Search(Space.of(PROBLEM, DEVICE, "toy"), seed=5, batch=4)
    found: list[Any] = []
    while batch := search.propose(4):
        found += batch
        search.report(batch, [by_block(s.to_dict()) * 1e-6 for s in batch])
    assert {(s.block_kv, s.order) for s in found} == {
        (b, o) for b in (1, 2, 4, 8) for o in ("ij", "ji")
    }
    assert len(found) == len(set(found))
    assert sum(search.rejections.values()) > 0


def test_search_repeats_with_its_seed(offer: Callable[..., None]) -> None:
    offer(block_kv=tuple(range(1, 65)), order=("ij", "ji"))

    def proposals(seed: int) -> list[Any]:
        search = Search(Space.of(PROBLEM, DEVICE, "toy"), seed, batch=8)
        found: list[Any] = []
        for _ in range(4):
            batch = search.propose(8)
            search.report(batch, [by_block(s.to_dict()) * 1e-6 for s in batch])
            found += batch
        return found

    assert proposals(3) == proposals(3) != proposals(4)


def test_search_beats_chance(offer: Callable[..., None]) -> None:
    """With the cost model, 40 of 512 points reach the best few."""
    offer(block_kv=tuple(range(1, 65)), order=tuple("abcdefgh"))
    search = Search(Space.of(PROBLEM, DEVICE, "toy"), seed=1, batch=8)

    def us(s: Any) -> float:
        return 1.0 + abs(s.block_kv - 37) / 8 + 2 * abs(ord(s.order[0]) - ord("f"))

    times: list[float] = []
    for _ in range(5):
        batch = search.propose(8)
        times += [us(s) for s in batch]
        search.report(batch, [us(s) * 1e-6 for s in batch])
    better = sum(us(ToyForward(b, o)) < min(times) for b in range(1, 65) for o in "abcdefgh")
    assert better <= 5


H200 = named_gpu("nvidia_h200")


@pytest.mark.parametrize("pass_", [p for family, p in SCHEDULES if family == "sm90"])
def test_search_proposes_what_fits_a_gpu(pass_: Any) -> None:
    """No GPU is needed to search: proposals fit, the hand-picked ones first, features are named."""
    problem = Problem(Variant(pass_, "bfloat16", 128, 128, True), Shape(1, 16, 4, 8192, 8192))
    space = Space.of(problem, H200, "sm90")
    search = Search(space, seed=2, batch=4)
    search.report([space.default], [1e-3])
    found: list[Any] = []
    for number in range(4):
        batch = search.propose(4)
        found += batch
        search.report(batch, [1e-3 / (1 + number)] * len(batch))
    assert len(set(found)) == len(found) >= 8
    assert space.default not in found
    assert not [reason for schedule in found for reason in space.reasons(schedule)]
    picked = [s for s in type(space.default).hand_picked(problem, H200) if s in found]
    assert found[: len(picked)] == picked
    rows = [columns(problem, schedule, H200, space.choices) for schedule in found]
    assert len({tuple(row) for row in rows}) == 1
    assert {"scratch_of_shared", "waves", "tail", "flops_per_byte"} <= set(rows[0])
    assert all(math.isfinite(value) for row in rows for value in row.values())
