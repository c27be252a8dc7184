"""A tuning job on a toy family of plain categorical decisions: runner, log, screen. No kernel runs.

The rows named are of BUGS.md, section I.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from toy_family import ToyForward
from tuner_stubs import PROBLEM, by_block, lines, offered, quick  # noqa: F401

from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.records import problem_to_dict
from fa2tvm.tune.cost_model import WARMUP_TRIALS
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.nouns import Failure, Measured, Options, Progress
from fa2tvm.tune.progress import LiveProgress, describe
from fa2tvm.tune.runner import Runner
from fa2tvm.tune.worker import WorkerSpec

# The runner.


def test_a_hopeless_candidate_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"default": 100.0, "good": 90.0, "slow": 301.0, "dies": 100.0}
    asked: list[tuple[str, bool]] = []

    def answer(_self: Runner, _what: str, path: Path, warm_up: bool, problem: Any) -> Any:
        assert problem == problem_to_dict(PROBLEM)
        asked.append((path.name, warm_up))
        if path.name == "dies" and not warm_up:
            return Failure("crash", "gone")
        return {"us": us[path.name]}

    monkeypatch.setattr(Runner, "_call", answer)
    runner = Runner(WorkerSpec("unused", Path()))
    results = runner.time(PROBLEM, [Path(name) for name in us], rounds=3)
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


def test_a_trial_keeps_what_the_model_expected_of_it(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    """In the ratio that the report shows beside the measured one; none before it has learned."""
    offer(block_kv=tuple(range(1, 65)), order=("ij", "ji"))
    result = quick(tmp_path, by_block, trials=60)
    trials = TrialLog(result.folder).load()
    late = [t for t in trials if t.predicted is not None]
    assert {t.trial for t in trials[:WARMUP_TRIALS]}.isdisjoint(t.trial for t in late)
    assert len(late) > 30
    expected = np.array([t.predicted for t in late])
    measured = np.array([1 / t.relative for t in late])
    assert np.corrcoef(expected, measured)[0, 1] > 0.9
    assert np.median(np.abs(expected / measured - 1)) < 0.3


@pytest.mark.parametrize("trials", [1, 2, 30])
def test_builds_ahead_of_measurements_change_no_count(
    tmp_path: Path, offer: Callable[..., None], trials: int
) -> None:
    """Candidates are built while others are measured; each point is tried once, none is lost."""
    offer(block_kv=tuple(range(1, 65)))
    options = Options(batch=5, first_batch=3, overlap=True)
    result = quick(tmp_path, by_block, trials=trials, options=options)
    assert (result.trials, result.stopped) == (trials, "trials")
    tried = [t.decisions["block_kv"] for t in TrialLog(result.folder).load()]
    assert len(set(tried)) == len(tried) == trials


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


def test_a_gpu_candidate_that_is_far_behind_is_dropped_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    us = {"default": 100.0, "near": 109.0, "far": 111.0}
    asked: list[str] = []

    def answer(_self: Runner, _what: str, path: Path, **_: Any) -> Any:
        asked.append(path.name)
        return {"us": us[path.name]}

    monkeypatch.setattr(Runner, "_call", answer)
    for kind, rounds in (("cuda", 3), ("llvm", 9)):
        asked.clear()
        runner = Runner(WorkerSpec("unused", Path()), kind)
        results = runner.time(PROBLEM, [Path(name) for name in us], rounds=9)
        assert results == [
            Measured((100.0,) * 9),
            Measured((109.0,) * 9),
            Measured((111.0,) * rounds),
        ]
        assert asked.count("far") == 1 + rounds


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
    monkeypatch.setattr("fa2tvm.tune.problem_job.program_version", lambda *_: "newer")
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
        if lines(tmp_path) >= 5:
            raise KeyboardInterrupt
        return by_block(decisions)

    result = quick(tmp_path, us, trials=30)
    assert result.stopped == "interrupted"
    assert len(TrialLog(result.folder).load()) == result.trials >= 5


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
