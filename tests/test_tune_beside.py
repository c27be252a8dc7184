"""Several variants tuned beside each other, and modules built before the job; no kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_family import ToyForward
from tuner_stubs import DEVICE, PROBLEM, StubBuilder, StubRunner, by_block, lines, offered  # noqa: F401

from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.problem import Variant
from fa2tvm.tune.job import build_first, make_workers, tune_beside
from fa2tvm.tune.nouns import Failure, Options

DENSE = replace(PROBLEM, variant=replace(PROBLEM.variant, causal=False))
GPU_LIKE = Options(batch=4, first_batch=4, rounds=1, overlap=True)


class SlowBuilder(StubBuilder):
    """Builds on one core, the lowest order first, a build when it is asked to `turn`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.waiting: list[tuple[int, int, Variant, ToyForward, Future[Path | Failure]]] = []
        self.order: list[int] = []

    def submit(
        self, variant: Variant, schedule: ToyForward, order: int = 0
    ) -> Future[Path | Failure]:
        built: Future[Path | Failure] = Future()
        self.waiting.append((order, len(self.order) + len(self.waiting), variant, schedule, built))
        return built

    def turn(self) -> None:
        self.waiting = [job for job in self.waiting if not job[-1].cancelled()]
        job = min(self.waiting, key=lambda job: job[:2])
        self.waiting.remove(job)
        order, _, variant, schedule, built = job
        self.order.append(order)
        built.set_result(self.build(variant, [schedule])[0])


def beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: Any, **options: Any
) -> tuple[SlowBuilder, dict[int, Any]]:
    """Tune two variants on stubs whose builds come one by one, when nothing else can go on."""
    builder, found = SlowBuilder(tmp_path), {}

    def wait(builds: Any, return_when: str) -> None:
        assert return_when == "FIRST_COMPLETED"
        assert builds
        assert not any(build.done() for build in builds)
        builder.turn()

    monkeypatch.setattr("fa2tvm.tune.interleave.wait", wait)
    tune_beside(
        [[PROBLEM], [DENSE]],
        DEVICE,
        lambda number, results: found.update({number: results}),
        family="toy",
        out=tmp_path,
        options=GPU_LIKE,
        workers=(builder, runner),
        **options,
    )
    return builder, found


def test_variants_go_on_beside_each_other(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has its builds first; the other is measured with what is left, and both end."""
    offer(block_kv=tuple(range(1, 33)))
    builder, found = beside(tmp_path, monkeypatch, StubRunner(by_block), trials=20)
    assert [results[0].trials for results in found.values()] == [20, 20]
    assert list(found) == [0, 1]
    assert sorted(builder.order) == [0] * 20 + [1] * 20
    # The second waits until the first can propose nothing more before it has heard results.
    assert builder.order[:5] == [0] * 5
    assert not [job for job in builder.waiting if not job[-1].cancelled()]
    for results in found.values():
        assert results[0].best_schedule().block_kv == 32


def test_a_variant_that_cannot_begin_leaves_the_others_alone(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(block_kv=tuple(range(1, 9)))

    class Runner(StubRunner):
        def check(self, path: Path, seed: int) -> Failure | None:
            first = builder_of[0].order[-1] == 0
            return Failure("wrong", "O is off") if first else None

    builder_of: list[SlowBuilder] = []
    monkeypatch.setattr(SlowBuilder, "__init__", _remembering(SlowBuilder.__init__, builder_of))
    _, found = beside(tmp_path, monkeypatch, Runner(by_block), trials=6)
    assert isinstance(found[0], InfeasibleSchedule)
    assert found[1][0].trials == 6


def _remembering(init: Any, into: list[Any]) -> Any:
    def wrapped(self: Any, folder: Path) -> None:
        init(self, folder)
        into.append(self)

    return wrapped


def test_an_interrupt_ends_all_variants_with_what_they_have(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(block_kv=tuple(range(1, 33)))

    def us(decisions: dict[str, Any]) -> float:
        if lines(tmp_path) >= 12:
            raise KeyboardInterrupt
        return by_block(decisions)

    _, found = beside(tmp_path, monkeypatch, StubRunner(us), trials=10)
    assert {number: results[0].stopped for number, results in found.items()} == {
        0: "trials",
        1: "interrupted",
    }


def test_seconds_run_for_the_oldest_variant_only(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two variants of 40 s each; a build takes a second: neither lives on the other's time."""
    offer(block_kv=tuple(range(1, 65)), order=tuple("abcdefgh"))
    now = {"s": 0.0}
    monkeypatch.setattr("fa2tvm.tune.loop.time.monotonic", lambda: now["s"])
    turn = SlowBuilder.turn

    def slow(self: SlowBuilder) -> None:
        now["s"] += 1.0
        turn(self)

    monkeypatch.setattr(SlowBuilder, "turn", slow)
    _, found = beside(tmp_path, monkeypatch, StubRunner(by_block), trials=None, seconds=40)
    assert [results[0].stopped for results in found.values()] == ["seconds", "seconds"]
    for results in found.values():
        assert 36 <= results[0].trials <= 48
        assert 36 <= results[0].seconds <= 48


def test_what_is_built_before_is_what_jobs_find_in_the_cache(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tune --only-build` on a machine without the device, then nothing is left to build there."""
    offer(block_kv=(1, 2, 4))
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("fa2tvm.tune.job.family_for", lambda *_: "toy")
    options = Options(plugins=("toy_family",), builders=1, first_batch=2, rounds=1)
    made = build_first([[PROBLEM]], DEVICE, 0, options)
    assert len(made) == 3
    monkeypatch.setattr("fa2tvm.tune.builder.Worker.call", _unwanted)
    builder, _ = make_workers(DEVICE, tmp_path, options)
    builds = [builder.submit(*program) for program in made]
    assert all(build.result().parent == tmp_path / "home" / "cache" for build in builds)
    builder.close()


def _unwanted(*_: Any) -> Any:
    raise AssertionError("it was in the cache")
