"""Candidates in worker processes: right ones are timed, faulty ones are recorded, the job goes on.

The toy family's faults stand for what a search meets: wrong, crashing, hanging, memory-eating and
unbuildable points. The rows named are of BUGS.md, section I.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import PATIENCE_S
from test_records import a_record
from toy_family import ToyForward

import fa2tvm
from fa2tvm import modules, reference
from fa2tvm.device import detect
from fa2tvm.lookup import family_for, lookup
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.records import device_summary, merge_records
from fa2tvm.schedule import Schedule
from fa2tvm.tune.builder import Builder
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.job import make_workers, tune, tune_beside
from fa2tvm.tune.nouns import Failure, Measured, Options
from fa2tvm.tune.runner import Runner
from fa2tvm.tune.space import Space

DEVICE = detect()
POINTS = 3
PROBLEM = Problem(Variant("forward", "float32", 16, 8, True), Shape(1, 2, 1, 64, 64))
# Patient, so that a loaded machine makes no right point a hanging one.
OPTIONS = Options(
    run_timeout_s=120.0,
    build_timeout_s=120.0,
    memory_bytes=1 << 30,
    builders=1,
    plugins=("toy_family",),
)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Builder, Runner]]:
    builder, runner = make_workers(DEVICE, tmp_path_factory.mktemp("w"), OPTIONS)
    runner.start()
    yield builder, runner
    builder.close()
    runner.close()


def outcome(workers: tuple[Builder, Runner], schedule: ToyForward) -> Failure | Measured:
    """What a job would write down about one point."""
    builder, runner = workers
    built = builder.submit(PROBLEM.variant, schedule).result()
    if isinstance(built, Failure):
        return built
    return runner.check(built, 0) or runner.time(PROBLEM, [built], 1)[0]


@pytest.mark.parametrize("schedule", [ToyForward(), ToyForward(4, "ji")])
def test_right_points_are_timed(workers: tuple[Builder, Runner], schedule: ToyForward) -> None:
    measured = outcome(workers, schedule)
    assert isinstance(measured, Measured), measured
    assert 0 < measured.us < 1e6


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("wrong", "wrong", "first call at .* is off by"),  # I04
        ("poison", "wrong", r"O\[.* is nan"),  # I05: what is never written shows
        ("crash", "crash", "SIGSEGV"),  # I12
        ("hang", "hang", "no answer within 3 s"),
        ("unbuildable", "build", "refuses to be built"),
        ("memory", "build", "memory limit"),
    ],
)
def test_faulty_points_are_recorded(
    workers: tuple[Builder, Runner],
    fault: str,
    kind: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault == "hang":
        monkeypatch.setattr(workers[1], "_timeout_s", 3.0)
    failure = outcome(workers, ToyForward(fault=fault))
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert re.search(reason, failure.reason), failure.reason


@pytest.mark.parametrize(
    "variant",
    [
        Variant("forward", "bfloat16", 40, 24, causal=True),
        Variant("backward", "float32", 64, 64, causal=True),
    ],
    ids=lambda variant: variant.name,
)
def test_points_of_the_space_are_right(
    variant: Variant, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random points of every family's space, against the oracle on awkward shapes."""
    problem = Problem(variant, Shape(1, 2, 1, 300, 300))
    space = Space.of(problem, DEVICE, family_for(DEVICE))
    rng = random.Random(seed)
    points: set[Schedule] = set()
    while len(points) < POINTS:
        point = type(space.default)(**{n: rng.choice(v) for n, v in space.choices.items()})
        points |= set() if space.reasons(point) else {point}
    builder, runner = make_workers(DEVICE, tmp_path_factory.mktemp("p"), Options())
    try:
        builds = {point: builder.submit(variant, point) for point in points}
        made = {point: build.result() for point, build in builds.items()}
        for point, built in made.items():
            assert isinstance(built, Path), (point, built)
            assert runner.check(built, seed) is None, (point, runner.check(built, seed))
    finally:
        builder.close()
        runner.close()


def test_a_hanging_build_holds_up_nobody(
    workers: tuple[Builder, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as hasty:
        hasty.setattr(workers[0], "_timeout_s", 3.0)
        hanging = workers[0].submit(PROBLEM.variant, ToyForward(fault="slow_build")).result()
    assert isinstance(hanging, Failure)
    assert "hang while building" in hanging.reason
    builds = [workers[0].submit(PROBLEM.variant, ToyForward(n)) for n in (8, 16)]
    after = [build.result() for build in builds]
    assert all(isinstance(path, Path) for path in after)


def test_a_job_survives_every_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole job over real processes; the fastest point is a wrong one and never wins (I04)."""
    faults = ("none", "wrong", "crash", "unbuildable")
    monkeypatch.setattr(
        ToyForward, "offered", {"block_kv": (1, 2), "order": ("ij",), "fault": faults}
    )
    before = children(os.getpid())
    result = tune(PROBLEM, DEVICE, family="toy", trials=8, out=tmp_path, options=OPTIONS)
    trials = TrialLog(result.folder).load()
    assert len(trials) == result.trials == 8
    assert {t.decisions["fault"]: t.error for t in trials} == {
        "none": None,
        "wrong": "wrong",
        "crash": "crash",
        "unbuildable": "build",
    }
    assert all(t.reason for t in trials if t.error)
    assert result.best_schedule().fault == "none"
    assert children(os.getpid()) == before


def test_two_variants_share_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: two builders and one runner for both; nothing is tried twice or left over."""
    faults = ("none", "unbuildable")
    monkeypatch.setattr(
        ToyForward, "offered", {"block_kv": (1, 2), "order": ("ij",), "fault": faults}
    )
    dense = dataclasses.replace(PROBLEM, variant=dataclasses.replace(PROBLEM.variant, causal=False))
    options = dataclasses.replace(OPTIONS, overlap=True, builders=2, batch=3, rounds=1)
    before = children(os.getpid())
    found: dict[int, Any] = {}
    tune_beside(
        [[PROBLEM], [dense]],
        DEVICE,
        lambda number, results: found.update({number: results}),
        family="toy",
        out=tmp_path,
        options=options,
    )
    for results in found.values():
        trials = TrialLog(results[0].folder).load()
        assert [t.error for t in trials].count("build") == 2
        assert len(trials) == results[0].trials == 4
        assert results[0].stopped == "exhausted"
    assert set(found) == {0, 1}
    assert children(os.getpid()) == before


def children(parent: int) -> list[str]:
    """Worker processes below a process, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == parent and "fa2tvm.tune.worker" in command:
            found.append(entry.name)
    return found


def workers_in(scratch: Path) -> list[str]:
    """Living worker processes whose FA2TVM_HOME lies in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(scratch).encode() in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [entry.name] if state != "Z" else []
        except OSError:
            continue
    return found


JOB = """
import sys
from pathlib import Path
import toy_family
from toy_family import ToyForward
from fa2tvm.device import detect
from fa2tvm.tune.job import tune
from fa2tvm.tune.nouns import Options
from test_candidates import PROBLEM
ToyForward.offered = {"block_kv": tuple(range(1, 33)), "order": ("ij", "ji"), "fault": ("none",)}
tune(PROBLEM, detect(), family="toy", trials=60, out=Path(sys.argv[1]), seed=int(sys.argv[2]),
     options=Options(plugins=("toy_family",), batch=3, rounds=1, builders=1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("how", "after"), [(signal.SIGKILL, 2), (signal.SIGINT, 5)])
def test_a_killed_job_loses_no_trial_and_leaves_no_child(
    tmp_path: Path, how: signal.Signals, after: int
) -> None:
    """BUGS I10 (TVM #11096): orphan workers ate the CPU after the tuner was gone."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(Path(__file__).parent)}
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(tmp_path), str(after)],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        seen = _wait_for_trials(tmp_path, after, job)
        os.kill(job.pid, how)
        job.wait(PATIENCE_S)
    finally:
        job.kill()
    deadline = time.monotonic() + PATIENCE_S
    while workers_in(scratch) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers_in(scratch)
    (path,) = tmp_path.rglob("trials.jsonl")
    trials = TrialLog(path.parent).load()
    assert len(trials) >= seen >= after
    assert [t.trial for t in trials] == list(range(len(trials)))


def _wait_for_trials(folder: Path, number: int, job: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and job.poll() is None:
        for path in folder.rglob("trials.jsonl"):
            found = path.read_bytes().count(b"\n")
            if found >= number:
                return found
        time.sleep(0.02)
    raise AssertionError("the job did not get that far")


# The user's side of a store.


@pytest.fixture
def fresh_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty FA2TVM_HOME, with no answer remembered from another."""
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path))
    modules.forget()
    yield tmp_path
    modules.forget()


def test_two_tuned_shapes_keep_their_schedules(
    fresh_store: Path, generator: torch.Generator
) -> None:
    """BUGS I06 (triton !1242): alternating shapes with different configurations, ten times."""
    variant = Variant("forward", "float32", 8, 8)
    default = lookup(Problem(variant, Shape(1, 2, 2, 9, 9)), DEVICE).schedule.to_dict()
    wanted = {}
    for seq, block_kv in ((96, 32), (600, 64)):
        problem = Problem(variant, Shape(1, 2, 2, seq, seq))
        wanted[seq] = {**default, "block_kv": block_kv}
        record = dataclasses.replace(
            a_record(problem), decisions=wanted[seq], device=device_summary(DEVICE)
        )
        merge_records(fresh_store / "schedules" / DEVICE.slug / "forward.jsonl", [record])
    inputs = {seq: torch.randn(3, 1, seq, 2, 8, generator=generator) for seq in wanted}
    first = {seq: fa2tvm.attention(*qkv) for seq, qkv in inputs.items()}
    for _ in range(10):
        for seq, qkv in inputs.items():
            assert torch.equal(fa2tvm.attention(*qkv), first[seq])
            problem = Problem(variant, Shape(1, 2, 2, seq, seq))
            assert modules.module_for(problem).schedule.to_dict() == wanted[seq]


def test_first_backward_of_a_fresh_store_is_right(
    fresh_store: Path, generator: torch.Generator
) -> None:
    """BUGS I05 (triton #54): tuning in the first call left sums of several runs in dQ."""
    q, k, v, dout = torch.randn(4, 1, 70, 2, 8, generator=generator).unbind()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    calls = [
        torch.autograd.grad(fa2tvm.attention(q, k, v, causal=True), (q, k, v), dout)
        for _ in range(2)
    ]
    exact = reference.attention_backward(
        *(x.detach().double().numpy() for x in (q, k, v, dout)), causal=True
    )
    for first, second, oracle in zip(*calls, exact, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first.double(), torch.from_numpy(oracle), rtol=0, atol=1e-5)
    assert not list(fresh_store.rglob("trials.jsonl"))
