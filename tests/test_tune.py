"""The tuner on a toy family of plain categorical decisions: search, log, job. No kernel runs here.

The rows named are of BUGS.md, section I.
"""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from toy_family import ToyForward

from fa2tvm.device import detect
from fa2tvm.errors import CorruptRecord, InfeasibleSchedule, JobBusy
from fa2tvm.lookup import lookup
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.records import read_records
from fa2tvm.tune.database import TrialLog, job_lock
from fa2tvm.tune.job import tune
from fa2tvm.tune.nouns import Failure, Measured, Progress
from fa2tvm.tune.progress import LiveProgress, describe
from fa2tvm.tune.promote import Promoted, promote
from fa2tvm.tune.runner import Runner, validated
from fa2tvm.tune.search import Search
from fa2tvm.tune.space import PREFIX, Space
from fa2tvm.tune.worker import WorkerSpec

DEVICE = detect()
PROBLEM = Problem(Variant("forward", "float32", 16, 8, True), Shape(1, 2, 1, 64, 64))


@pytest.fixture(autouse=True)
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the toy's space."""

    def put(**choices: tuple[Any, ...]) -> None:
        monkeypatch.setattr(
            ToyForward,
            "offered",
            {"block_kv": (1,), "order": ("ij",), "fault": ("none",)} | choices,
        )

    put()
    return put


class StubBuilder:
    """Builds nothing: a module is a folder that is named by its decisions."""

    def __init__(
        self, folder: Path, fail: Callable[[ToyForward], str | None] = lambda _: None
    ) -> None:
        self.folder, self.fail, self.built = folder, fail, 0

    def build(self, schedules: Sequence[ToyForward]) -> list[Path | Failure]:
        results: list[Path | Failure] = []
        for schedule in schedules:
            reason = self.fail(schedule)
            self.built += 1
            path = self.folder / f"{self.built}-{json.dumps(schedule.to_dict())}"
            results.append(Failure("build", reason) if reason else path)
        return results

    def start(self) -> None: ...

    def close(self) -> None: ...


class StubRunner:
    """Times by a formula; `wrong` says which points the oracle refuses."""

    def __init__(
        self,
        us: Callable[[dict[str, Any]], float],
        wrong: Callable[[dict[str, Any]], bool] = lambda _: False,
    ) -> None:
        self.us, self.wrong, self.timed = us, wrong, 0

    def check(self, path: Path) -> Failure | None:
        return Failure("wrong", "O is off") if self.wrong(self._decisions(path)) else None

    def time(self, paths: Sequence[Path], rounds: int) -> list[Measured | Failure]:
        self.timed += len(paths)
        times = [self.us(self._decisions(path)) for path in paths]
        return [validated([us] * rounds) for us in times]

    def start(self) -> None: ...

    def close(self) -> None: ...

    @staticmethod
    def _decisions(path: Path) -> dict[str, Any]:
        decisions: dict[str, Any] = json.loads(path.name.partition("-")[2])
        return decisions


def quick(tmp_path: Path, us: Callable[[dict[str, Any]], float], **options: Any) -> Any:
    """A job on stubs."""
    runner = StubRunner(us, options.pop("wrong", lambda _: False))
    builder = StubBuilder(tmp_path, options.pop("fail", lambda _: None))
    return tune(
        PROBLEM,
        DEVICE,
        family="toy",
        out=tmp_path / "logs",
        workers=(builder, runner),
        **{"trials": 12, **options},
    )


def by_block(decisions: dict[str, Any]) -> float:
    return 100.0 / float(decisions["block_kv"])


# The adapters between MetaSchedule and a family.


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


# The log.


def a_trial(number: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "key": "k",
        "problem": f"p{number}",
        "decisions": {"block_kv": number},
        "us": 1.5,
        "us_default": 2.0,
        "runs_us": (1.0, 1.5, 2.0),
        "error": None,
        "reason": None,
        "date": "2026-11-30T00:00:00+00:00",
    }
    return fields | changes


def test_log_round_trip(tmp_path: Path) -> None:
    log = TrialLog(tmp_path)
    written = [log.append(**a_trial(n)) for n in range(3)]
    assert [t.trial for t in written] == [0, 1, 2]
    assert TrialLog(tmp_path).load() == written


def test_half_written_last_line_is_kept_aside(tmp_path: Path) -> None:
    log = TrialLog(tmp_path)
    log.append(**a_trial(0))
    with log.path.open("a") as stream:
        stream.write('{"trial": 1, "ke')
    with pytest.warns(RuntimeWarning, match=r"trials\.jsonl:2 is no trial"):
        assert len(log.load()) == 1
    with pytest.warns(RuntimeWarning, match=r"trials\.jsonl:2 was half written"):
        assert log.append(**a_trial(1)).trial == 1
    assert (tmp_path / "trials.jsonl.line2.partial").read_text() == '{"trial": 1, "ke'
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [t.problem for t in log.load()] == ["p0", "p1"]


def test_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    log = TrialLog(tmp_path)
    for n in range(3):
        log.append(**a_trial(n))
    lines = log.path.read_text().splitlines()
    lines[1] = lines[1].replace('"us": 1.5', '"us": null')
    log.path.write_text("\n".join(lines) + "\n")
    with pytest.warns(RuntimeWarning, match=r"trials\.jsonl:2 is no trial"):
        assert [t.trial for t in log.load()] == [0, 2]


def _write_many(folder: Path, problem: str) -> None:
    log = TrialLog(folder)
    for n in range(20):
        log.append(**a_trial(n, problem=problem))


def test_two_writers_both_land(tmp_path: Path) -> None:
    """BUGS I09: two processes, 20 records each; all 40 stand under their own workload."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    trials = TrialLog(tmp_path).load()
    assert sorted(t.trial for t in trials) == list(range(40))
    for name in "ab":
        mine = [t.decisions["block_kv"] for t in trials if t.problem == name]
        assert mine == list(range(20))


def test_second_job_in_a_folder_is_refused(tmp_path: Path) -> None:
    with job_lock(tmp_path), pytest.raises(JobBusy, match="in use"), job_lock(tmp_path):
        pass
    with job_lock(tmp_path):
        pass


# The runner.


def test_a_hopeless_candidate_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"default": 100.0, "good": 90.0, "slow": 301.0, "dies": 100.0}
    asked: list[tuple[str, bool]] = []

    def answer(_self: Runner, _what: str, path: Path, warm_up: bool) -> Any:
        asked.append((path.name, warm_up))
        if path.name == "dies" and not warm_up:
            return Failure("crash", "gone")
        return {"us": us[path.name]}

    monkeypatch.setattr(Runner, "_call", answer)
    runner = Runner(PROBLEM, WorkerSpec("unused", Path()), seed=0)
    results = runner.time([Path(name) for name in us], rounds=3)
    assert results[:3] == [Measured((100.0,) * 3), Measured((90.0,) * 3), Measured((301.0,))]
    assert results[3] == Failure("crash", "gone")
    assert [name for name, warm_up in asked if not warm_up][:3] == ["default", "good", "dies"]
    assert len(asked) == 4 + 3 + 3 + 1


# The job.


def test_job_finds_the_best_and_tells(tmp_path: Path, offer: Callable[..., None]) -> None:
    offer(block_kv=(1, 2, 4, 8), order=("ij", "ji"))
    said: list[Progress] = []
    result = quick(tmp_path, by_block, progress=said.append)
    assert result.best_schedule().block_kv == 8
    assert result.ratio == 8.0
    assert result.default.trial == 0
    assert result.stopped == "exhausted"
    assert (result.trials, result.failed) == (8, 0)
    assert "8.00 times as fast" in result.message
    assert [p.trials for p in said] == sorted(p.trials for p in said)
    assert said[-1].phase == "done"
    assert said[-1].best_us == pytest.approx(12.5)
    assert said[-1].gflops == pytest.approx(PROBLEM.flops() / 12.5e3)
    job = json.loads((result.folder / "job.json").read_text())
    assert job["problem"]["variant"]["head_dim_qk"] == 16
    assert {"seed", "versions", "commit", "machine", "program", "date"} <= set(job["runs"][0])


def test_job_stops_by_trials_and_by_time(tmp_path: Path, offer: Callable[..., None]) -> None:
    offer(block_kv=tuple(range(1, 65)))
    assert quick(tmp_path / "a", by_block, trials=7).trials == 7
    result = quick(tmp_path / "b", by_block, trials=None, seconds=1e-3)
    assert result.stopped == "seconds"
    assert result.trials == 1
    assert "default schedule stays the best" in result.message


def test_space_without_a_feasible_point_ends_with_a_sentence(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    """BUGS I01 (TVM #12330): the search looped for ever; here the default is used."""
    offer(block_kv=(128, 256, 512), order=("ij",))
    result = quick(tmp_path, by_block, trials=8)
    assert result.stopped == "exhausted"
    assert result.best == result.default
    assert "no feasible point" in result.message
    assert "at most 64 fits" in result.message
    assert result.message.endswith("the default schedule stays the best.")


def test_infeasible_default_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ToyForward, "default", classmethod(lambda *_: ToyForward(block_kv=999)))
    with pytest.raises(InfeasibleSchedule, match="at most 64 fits"):
        quick(tmp_path, by_block)


@pytest.mark.parametrize("bad", [0.0, -3.0, math.nan, math.inf])
def test_bad_times_are_invalid_trials(
    tmp_path: Path, offer: Callable[..., None], bad: float
) -> None:
    """BUGS I02 (TVM !13354): a measured time of 0 tripped an assertion in mid-tuning."""
    offer(block_kv=(1, 2, 4, 8))
    result = quick(tmp_path, lambda d: bad if d["block_kv"] == 8 else by_block(d))
    assert result.best_schedule().block_kv == 4
    (failed,) = [t for t in TrialLog(result.folder).load() if t.error]
    assert (failed.error, failed.decisions["block_kv"]) == ("timing", 8)
    assert "positive and finite" in str(failed.reason)


def test_wrong_but_fast_never_wins(tmp_path: Path, offer: Callable[..., None]) -> None:
    """BUGS I04 (TVM #13204): a wrong schedule was the fastest one."""
    offer(block_kv=(1, 2, 4, 8), order=("ij", "ji"))
    result = quick(tmp_path, by_block, wrong=lambda d: d["block_kv"] == 8)
    assert result.best_schedule().block_kv == 4
    assert result.failed == 2
    errors = [t.error for t in TrialLog(result.folder).load() if t.decisions["block_kv"] == 8]
    assert errors == ["wrong", "wrong"]


def test_failed_default_ends_the_job_at_once(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleSchedule, match=r"default schedule .* failed"):
        quick(tmp_path, by_block, wrong=lambda _: True)
    with pytest.raises(InfeasibleSchedule, match="no linker"):
        quick(tmp_path / "b", by_block, fail=lambda _: "no linker")


def test_resume_repeats_no_trial_and_knows_the_best(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    offer(block_kv=tuple(range(1, 33)))
    first = quick(tmp_path, by_block, trials=16)
    second = quick(tmp_path, by_block, trials=8, seed=9)
    trials = TrialLog(first.folder).load()
    assert len(trials) == 24
    tried = [t.decisions["block_kv"] for t in trials]
    assert sorted(tried).count(1) == 2  # the default is measured in each run
    assert len(set(tried)) == 23
    assert second.best.us_default / second.best.us >= first.best.us_default / first.best.us
    assert len(json.loads((first.folder / "job.json").read_text())["runs"]) == 2


def test_resume_ignores_what_is_not_its_own(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of another kernel version teach nothing, however fast they were."""
    offer(block_kv=(1, 2, 4))
    first = quick(tmp_path, lambda d: by_block(d) / 1000 if d["block_kv"] == 2 else by_block(d))
    assert first.best_schedule().block_kv == 2
    monkeypatch.setattr("fa2tvm.tune.loop.program_version", lambda *_: "newer")
    second = quick(tmp_path, by_block)
    assert second.best_schedule().block_kv == 4
    assert second.trials == 3


def test_drift_of_the_machine_does_not_pick_the_winner(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    """The machine gets faster with every batch: only the ratio to the default counts."""
    offer(block_kv=tuple(range(1, 33)))
    speed = {"now": 1.0}

    def us(decisions: dict[str, Any]) -> float:
        if decisions["block_kv"] == 1:  # the default comes first in every round of timing
            speed["now"] *= 1.5
        return (200.0 - decisions["block_kv"]) / speed["now"]

    assert quick(tmp_path, us, trials=33).best_schedule().block_kv == 32


def test_interrupt_keeps_what_was_found(tmp_path: Path, offer: Callable[..., None]) -> None:
    offer(block_kv=tuple(range(1, 33)))

    def us(decisions: dict[str, Any]) -> float:
        if _lines(tmp_path) >= 5:
            raise KeyboardInterrupt
        return by_block(decisions)

    result = quick(tmp_path, us, trials=30)
    assert result.stopped == "interrupted"
    assert len(TrialLog(result.folder).load()) == result.trials >= 5


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("trials.jsonl"))


# Promotion.


def promoted(tmp_path: Path, us: Callable[[dict[str, Any]], float], **options: Any) -> Promoted:
    """Promote on stubs what `quick` has logged."""
    builder, runner = StubBuilder(tmp_path), StubRunner(us, options.pop("wrong", lambda _: False))
    return promote(
        PROBLEM,
        DEVICE,
        family="toy",
        logs=tmp_path / "logs",
        schedules=tmp_path / "schedules",
        workers=(builder, runner),
        **options,
    )


def test_promote_writes_a_record_that_points_to_its_trial(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    offer(block_kv=(1, 2, 4, 8))
    result = quick(tmp_path, by_block)
    verdict = promoted(tmp_path, by_block)
    assert verdict.record.decisions["block_kv"] == 8
    assert verdict.record.ratio == pytest.approx(8.0)
    records, complaints = read_records(verdict.path)
    assert not complaints
    assert records[0].decisions == verdict.record.decisions
    name, _, number = verdict.record.log.partition("#")
    trials = TrialLog((tmp_path / "logs" / name).parent).load()
    assert trials[int(number)].decisions == verdict.record.decisions
    assert trials[int(number)] == result.best
    assert [c.schedule.block_kv for c in verdict.contenders] == [1, 8, 4, 2]


def test_promote_keeps_the_default_unless_it_is_beaten_clearly(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    offer(block_kv=(1, 2, 4, 8))
    quick(tmp_path, by_block)
    verdict = promoted(tmp_path, lambda d: 99.0 if d["block_kv"] == 8 else 100.0)
    assert verdict.record.decisions["block_kv"] == 1
    assert verdict.record.ratio == 1.0
    assert "default schedule" in verdict.message


def test_promote_checks_again(tmp_path: Path, offer: Callable[..., None]) -> None:
    """BUGS I04: a trial that passed by luck is refused on fresh data, however fast it is."""
    offer(block_kv=(1, 2, 4, 8))
    quick(tmp_path, by_block)
    verdict = promoted(tmp_path, by_block, wrong=lambda d: d["block_kv"] == 8)
    assert verdict.record.decisions["block_kv"] == 4
    assert [c.failure.kind for c in verdict.contenders if c.failure] == ["wrong"]


def test_promote_needs_trials_of_this_kernel(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(block_kv=(1, 2))
    with pytest.raises(CorruptRecord, match="tune it first"):
        promoted(tmp_path, by_block)
    quick(tmp_path, by_block)
    monkeypatch.setattr("fa2tvm.tune.promote.program_version", lambda *_: "newer")
    with pytest.raises(CorruptRecord, match="tune it first"):
        promoted(tmp_path, by_block)


def test_promoted_record_is_what_lookup_finds(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(block_kv=(1, 2, 4))
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path))
    quick(tmp_path, by_block)
    assert lookup(PROBLEM, DEVICE, family="toy").origin == "default"
    verdict = promoted(tmp_path, by_block)
    found = lookup(PROBLEM, DEVICE, family="toy")
    assert (found.origin, found.schedule) == ("user overlay", ToyForward(4))
    assert found.record is not None
    assert found.record.key == verdict.record.key


# On the screen.


def test_live_progress_says_what_matters(tmp_path: Path, offer: Callable[..., None]) -> None:
    offer(block_kv=(1, 2, 4))
    screen = io.StringIO()
    for terminal in (False, True):
        console = Console(file=screen, force_terminal=terminal, width=200)
        with LiveProgress("toy", console) as live:
            quick(tmp_path, by_block, progress=live.show, resume=False)
    text = screen.getvalue()
    assert "3 of 12 trials" in text
    assert "4.00 x the default" in text
    assert "GFLOP/s" in text
    now = Progress("timing", 5, 1, 9, 50.0, 100.0, 12.0, 83.0)
    assert describe(now) == (
        "5 of 9 trials (1 failed), best 0.05 ms, 12 GFLOP/s, 2.00 x the default, 1:23 left, timing"
    )
