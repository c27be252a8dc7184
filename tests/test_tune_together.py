"""Problems of one variant are tuned together: they share their modules, not their winners."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_family import ToyForward
from tuner_stubs import DEVICE, PROBLEM, StubBuilder, StubRunner, by_block, offered  # noqa: F401

from fa2tvm.device import nvidia_h200
from fa2tvm.errors import UnsupportedProblem
from fa2tvm.problem import Problem, Variant
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.job import (
    first_programs,
    log_folder,
    tune_together,
)
from fa2tvm.tune.nouns import Failure, Measured, Options
from fa2tvm.tune.promote import promote_together
from fa2tvm.tune.runner import validated


def lengths(*sizes: int) -> list[Problem]:
    return [replace(PROBLEM, shape=replace(PROBLEM.shape, seq_q=n, seq_kv=n)) for n in sizes]


class LengthRunner(StubRunner):
    """Short sequences like small blocks, long ones large blocks."""

    def time(
        self, problem: Problem, paths: Sequence[Path], rounds: int
    ) -> list[Measured | Failure]:
        blocks = [self._decisions(path)["block_kv"] for path in paths]
        best = 2 if problem.shape.seq_q == 64 else 16
        return [validated([100.0 + abs(math.log2(b / best))] * rounds) for b in blocks]

    def sustain(
        self, problem: Problem, paths: Sequence[Path], rounds: int
    ) -> list[Measured | Failure]:
        blocks = [self._decisions(path)["block_kv"] for path in paths]
        return [validated([1000.0 if b == 16 else 600.0 - b] * rounds) for b in blocks]


def test_problems_of_a_variant_share_their_builds(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    """Each has its own log and winner; a candidate of one search is timed on both."""
    offer(block_kv=(1, 2, 4, 8, 16, 32))
    builder = StubBuilder(tmp_path)
    together = {"family": "toy", "workers": (builder, LengthRunner(by_block))}
    short, long = tune_together(lengths(64, 4096), DEVICE, out=tmp_path, trials=20, **together)
    assert builder.built == 6
    assert (short.best_schedule().block_kv, long.best_schedule().block_kv) == (2, 16)
    for result in (short, long):
        tried = [t.decisions["block_kv"] for t in TrialLog(result.folder).load()]
        assert sorted(tried) == [1, 2, 4, 8, 16, 32]
        assert json.loads((result.folder / "job.json").read_text())["runs"]


def test_what_is_built_ahead_is_what_a_job_begins_with(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(block_kv=tuple(range(1, 33)), order=("ij", "ji"))
    monkeypatch.setattr("fa2tvm.tune.job.family_for", lambda *_: "toy")
    problems, options = lengths(64, 128, 4096), Options(batch=5, first_batch=5)
    ahead = first_programs(problems, DEVICE, 3, options)
    asked: list[Any] = []

    class Builder(StubBuilder):
        def build(self, variant: Variant, schedules: Sequence[ToyForward]) -> list[Path | Failure]:
            asked.extend((variant, schedule) for schedule in schedules)
            return super().build(variant, schedules)

    workers = (Builder(tmp_path), StubRunner(by_block))
    tune_together(
        problems, DEVICE, out=tmp_path, trials=7, seed=3, options=options, workers=workers
    )
    assert set(asked[:6]) == set(ahead)
    assert len(asked) == 7


def test_problems_of_two_variants_are_refused(tmp_path: Path) -> None:
    other = replace(PROBLEM, variant=replace(PROBLEM.variant, causal=False))
    with pytest.raises(UnsupportedProblem, match="split them"):
        tune_together([PROBLEM, other], DEVICE, family="toy", out=tmp_path)


def test_long_problems_on_a_gpu_must_win_back_to_back_too(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    """Block 16 is the fastest in a burst and twice as slow at the clocks that power leaves."""
    offer(block_kv=(1, 2, 4, 8, 16, 32))
    gpu = replace(DEVICE, kind="cuda", slug="a_gpu")
    problems = lengths(64, 4096)
    together = {"family": "toy", "workers": (StubBuilder(tmp_path), LengthRunner(by_block))}
    tune_together(problems, DEVICE, out=tmp_path, trials=20, **together)
    (tmp_path / DEVICE.slug).rename(tmp_path / gpu.slug)
    for path in tmp_path.glob("a_gpu/*/*/trials.jsonl"):
        path.write_text(path.read_text().replace(DEVICE.slug, gpu.slug))
    short, long = promote_together(
        problems, gpu, logs=tmp_path, schedules=tmp_path / "schedules", **together
    )
    assert short.record.decisions["block_kv"] == 2
    ratios = {c.schedule.block_kv: c.sustained_ratio for c in long.contenders}
    assert [b for b, ratio in ratios.items() if ratio is not None and ratio < 1] == [16]
    assert long.record.decisions["block_kv"] in (8, 32)
    (verdict,) = json.loads((tmp_path / long.record.log).parent.joinpath("job.json").read_text())[
        "verdicts"
    ]
    assert f"#{verdict['winner']}" in long.record.log
    assert len(verdict["contenders"]) == len(long.contenders)


def test_a_slower_family_is_tuned_on_its_own(tmp_path: Path) -> None:
    """The portable family on Hopper: its own programs, its own logs."""
    problem = replace(PROBLEM, variant=replace(PROBLEM.variant, dtype="bfloat16"))
    ahead = first_programs([problem], nvidia_h200(), 0, Options(first_batch=3), "sm80")
    assert {schedule.family for _, schedule in ahead} == {"sm80"}
    folders = {log_folder(tmp_path, problem, nvidia_h200(), f) for f in ("sm80", "sm90")}
    assert {folder.name for folder in folders} == {problem.name, f"{problem.name}_sm80"}
