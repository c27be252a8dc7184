"""BUGS sections I and J on the tuner, its checks, workers and full disks."""

from __future__ import annotations

import base64
import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import ROOT
from test_candidates import DEVICE, OPTIONS, PROBLEM
from toy_family import ToyForward

from fa2tvm import compile as compiler
from fa2tvm.device import detect
from fa2tvm.lookup import lookup
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.records import tuning_key, versions
from fa2tvm.tune import harness, stopwatch
from fa2tvm.tune.builder import Builder
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.loop import Job
from fa2tvm.tune.nouns import Failure
from fa2tvm.tune.space import Space
from fa2tvm.tune.worker import Worker, WorkerFailure, WorkerSpec


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(("seq", "head_dim"), [(1, 64), (1000, 72), (1, 72), (37, 1)])
def test_awkward_shapes_have_a_space_and_a_fallback(pass_: Any, seq: int, head_dim: int) -> None:
    """I03 (TVM #14137): rules for tensor cores failed for some shapes, with varying errors."""
    problem = Problem(Variant(pass_, "float32", head_dim, head_dim), Shape(1, 2, 2, seq, seq))
    space = Space.of(problem, DEVICE, "cpu")
    assert not space.reasons(space.default)
    assert space.contains(space.default)
    assert lookup(problem, DEVICE).schedule.feasible(problem.variant, DEVICE)


def test_a_failed_build_names_variant_and_candidate(tmp_path: Path) -> None:
    """I03: the message was "ScheduleError: (not rendered)"."""
    spec = WorkerSpec("fa2tvm.tune.builder", tmp_path, OPTIONS.plugins, OPTIONS.memory_bytes, 1)
    builder = Builder(DEVICE, spec, 1)
    schedule = ToyForward(block_kv=4, fault="unbuildable")
    try:
        built = builder.submit(PROBLEM.variant, schedule).result()
    finally:
        builder.close()
    assert isinstance(built, Failure)
    assert PROBLEM.variant.name in built.reason
    assert str(schedule.to_dict()) in built.reason


def test_short_kernels_are_timed_by_the_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """I14 (PT !179246): a round lasts long enough for the clock; its calls are averaged."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    clock = iter(1e-4 * n for n in range(10_000))
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(stopwatch, "_call", lambda *_: call)
    short = Problem(Variant("forward", "float32", 64, 64), Shape(1, 1, 1, 128, 128))
    us = stopwatch.timed(None, short, "cpu", warm_up=False)  # type: ignore[arg-type]
    # Each call seems to take 100 us, as the clock ticks once a look: 200 fill a round.
    assert calls == 1 + min(stopwatch.MAX_CALLS, round(stopwatch.ROUND_SECONDS / 1e-4))
    assert us == pytest.approx(100 / (calls - 1))


@pytest.mark.parametrize(
    "change",
    [
        {"problem": "forward_float32_d16_dv8_causal_b1_h2k1_q65_k64"},
        {"key": ("cpu_other", "p", versions())},
        {"key": (DEVICE.slug, "another program", versions())},
        {"key": (DEVICE.slug, "p", {"apache-tvm": "0.28.0"})},
    ],
    ids=["workload", "device", "program", "compiler"],
)
def test_trials_of_something_else_teach_nothing(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I07, I09: a log may hold other problems' trials, or those of another device or version."""
    monkeypatch.setattr("fa2tvm.tune.problem_job.program_version", lambda *_: "p")
    log = TrialLog(tmp_path)
    job = Job(Space.of(PROBLEM, DEVICE, "toy"), log, None)  # type: ignore[arg-type]
    mine = {
        "key": tuning_key(PROBLEM, "toy", DEVICE.slug, "p", versions()),
        "problem": PROBLEM.name,
        "decisions": ToyForward(2).to_dict(),
        "us": 1.0,
        "us_default": 2.0,
        "runs_us": [1.0],
        "error": None,
        "reason": None,
        "date": "d",
    }
    if "key" in change:
        change = {"key": tuning_key(PROBLEM, "toy", *change["key"])}
    log.append(**mine)
    log.append(**mine | change)
    assert [trial.trial for trial in job.earlier()] == [0]


# What the check of a candidate notices beside wrong results.

SMALL = Variant("forward", "float32", 8, 8)


def module_that(spoil: Callable[..., None]) -> Any:
    """A right module that does something more."""
    module = compiler.load(compiler.build(SMALL, lookup_schedule(), detect()))

    def function_on(*arguments: Any) -> None:
        module.function_on(*arguments)
        spoil(*arguments)

    return dataclasses.replace(module, function_on=function_on)


def lookup_schedule() -> Any:
    return lookup(Problem(SMALL, Shape(1, 1, 1, 9, 9)), detect()).schedule


def outside(*arguments: Any) -> None:
    out = arguments[3]
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda *_: None, None),
        (lambda *a: a[0][0, 0, 0].fill_(7), "input q was changed"),
        (lambda *a: a[2][0, -1, 0].fill_(7), "input v was changed"),
        (outside, "memory outside the output was written"),
        (lambda *a: a[3][0, 0, 0].fill_(math.nan), r"O\[.* is nan"),
        (lambda *a: a[4][0, 0].add_(1e-2), "LSE: the worst element is off by"),
    ],
    ids=["right", "q", "v", "outside", "NaN", "LSE"],
)
def test_what_the_check_of_a_candidate_notices(spoil: Any, message: str | None) -> None:
    """I04, I05 (TVM #13204, triton #54): inputs, surroundings and every output are compared."""
    reason = harness.check(module_that(spoil), seed=3)
    assert reason is None if message is None else re.search(message, str(reason))


# Workers.


def test_a_closed_worker_stays_closed(tmp_path: Path) -> None:
    """I10: a thread that builds on after Ctrl-C starts no process any more."""
    worker = Worker(WorkerSpec("fa2tvm.tune.builder", tmp_path))
    worker.close()
    with pytest.raises(WorkerFailure, match="the job has ended"):
        worker.start()


def test_a_lost_gpu_ends_its_worker_only(tmp_path: Path) -> None:
    """I12 (TVM #13639): what test_gpu_tune.py does with a real fault."""
    worker = Worker(WorkerSpec("lost_gpu_role", tmp_path))
    try:
        absent = {"do": "check", "path": str(tmp_path / "absent"), "device": "cuda", "seed": 0}
        for _ in range(2):
            assert "no complete module" in worker.call(absent, 240)["reason"]
            with pytest.raises(
                WorkerFailure,
                match=r"exit status 77\) CUDA error: an illegal memory access was encountered \(.*",
            ) as lost:
                worker.call(absent | {"fault": True}, 240)
            assert lost.value.kind == "crash"
    finally:
        worker.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0",  # half of a length
        b"\0\0\1\0{",  # half of an answer
        b"\x7f\xff\xff\xff{}",  # two gigabytes, as far as one can see
        b"\xff\xff\xff\xff\x7f" + bytes(7) + b"{}",
        b"\0\0\0\2[[",  # no JSON
    ],
)
def test_a_spoiled_worker_does_not_hold_up_its_parent(data: bytes, tmp_path: Path) -> None:
    """I12: a read of the rest of an answer has an end, too."""
    worker = Worker(WorkerSpec("garbled_role", tmp_path))
    try:
        with pytest.raises(WorkerFailure) as failed:
            worker.call({"bytes": base64.b64encode(data).decode()}, 240)
        assert failed.value.kind == "crash"
        assert worker.call({}, 240) == {}
    finally:
        worker.close()


def test_no_process_to_be_had_is_a_failure_of_the_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: out of processes, or out of disk for a worker's log."""
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path))  # nothing is built yet
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    builder = Builder(DEVICE, WorkerSpec("fa2tvm.tune.builder", tmp_path), 1)
    builder.start()
    built = builder.submit(PROBLEM.variant, ToyForward()).result()
    assert isinstance(built, Failure)
    assert "no worker can be started" in built.reason
    builder.close()


FULL = """
import logging, os, sys
from pathlib import Path
import torch
import fa2tvm
from fa2tvm.errors import StoreUnavailable
from fa2tvm.problem import Variant
from fa2tvm.tune.database import TrialLog
full = Path(sys.argv[1])
(full / "filler").write_bytes(b"x" * 4096)
sys.path.insert(0, sys.argv[2])
import compiled
for attempt in range(2):
    try:
        compiled.build(Variant("forward", "float32", 8, 8))
        raise AssertionError("a module of 30 KiB fitted")
    except StoreUnavailable as error:
        assert "No space left on device" in str(error), error
assert not list((full / "home" / "cache").iterdir())
q = torch.randn(1, 33, 2, 8)
with torch.no_grad():
    out = fa2tvm.attention(q, q, q)
want = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3)
torch.testing.assert_close(out, want.transpose(1, 2))
log = TrialLog(full / "logs")
try:
    for n in range(1000):
        log.append(key="k", problem="p", decisions={}, us=None, us_default=None, runs_us=(),
                   error="e", reason="r" * 300, date="d")
    raise AssertionError("the disk is not full")
except StoreUnavailable as error:
    assert "No space left on device" in str(error), error
assert len(log.load()) == n
print("told")
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_full_disk_is_told_and_calls_go_on(tmp_path: Path) -> None:
    """Issue 7: LLVM ends its process where it cannot write, and with it a training run."""
    full = tmp_path / "full"
    full.mkdir()
    mount = f"mount -t tmpfs -o size=24k tmpfs '{full}'"
    inside = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*inside, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    tests = os.fspath(Path(__file__).parent)
    run = [sys.executable, "-W", "error::RuntimeWarning", "-c", FULL, os.fspath(full), tests]
    done = subprocess.run(
        [*inside, "sh", "-c", f'{mount} && exec "$@"', "sh", *run],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT), "FA2TVM_HOME": os.fspath(full / "home")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "told\n", done.stdout + done.stderr
    assert "each process compiles for itself" in done.stderr


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_misaligned_storage_gives_the_same_bits(
    dtype: torch.dtype, offset: int, generator: torch.Generator
) -> None:
    """F02 and issue 7: tensors over a buffer that starts at an odd byte."""
    import fa2tvm

    good = torch.randn(3, 1, 9, 2, 8, generator=generator).to(dtype)
    room = bytearray(good.nbytes + offset)
    moved = torch.frombuffer(room, dtype=dtype, offset=offset).view(good.shape).copy_(good)
    assert moved.data_ptr() % 4
    results = []
    for tensors in (good, moved):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = fa2tvm.attention(*leaves, causal=True)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
