"""Lookup: its order, what never applies, and that it says which step answered."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from python_process import PATIENCE_S
from test_records import a_problem, a_record

from fa2tvm import lookup as lookup_module
from fa2tvm.device import Device, baseline
from fa2tvm.errors import InfeasibleSchedule, UnsupportedProblem
from fa2tvm.lookup import Found, home, lookup, shipped_root
from fa2tvm.problem import Problem, Shape
from fa2tvm.records import Record, device_summary, merge_records
from fa2tvm.schedule import CpuForward

HERE = baseline("x86-64-v3")
OTHER_MODEL = dataclasses.replace(HERE, slug="cpu_other")
OTHER_LEVEL = baseline("x86-64-v4")

Store = Callable[..., Record]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Put a record of (problem, device, block_kv) into the overlay or among the shipped."""
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(lookup_module, "shipped_root", lambda: tmp_path / "shipped")

    def put(
        problem: Problem, device: Device, block_kv: int, where: str = "shipped", **changes: object
    ) -> Record:
        record = dataclasses.replace(
            a_record(problem),
            decisions={**CpuForward.default(problem.variant, HERE).to_dict(), "block_kv": block_kv},
            device=device_summary(device),
            **changes,
        )
        folder = tmp_path / where / "schedules" / device.slug
        merge_records(folder / f"{problem.variant.pass_}.jsonl", [record])
        return record

    return put


def origin_and_block(found: Found) -> tuple[str, int]:
    return found.origin, found.schedule.to_dict()["block_kv"]


def test_order_of_the_steps(store: Store) -> None:
    problem = a_problem()
    default = CpuForward.default(problem.variant, HERE)
    assert lookup(problem, HERE) == Found("cpu", default, "default")
    store(problem, OTHER_MODEL, 32)
    assert origin_and_block(lookup(problem, HERE)) == ("shipped for this arch", 32)
    store(problem, HERE, 128)
    assert origin_and_block(lookup(problem, HERE)) == ("shipped for this device", 128)
    store(problem, HERE, 256, where="home")
    found = lookup(problem, HERE)
    assert origin_and_block(found) == ("user overlay", 256)
    assert found.record is not None
    explicit = dataclasses.replace(default, block_q=64)
    assert lookup(problem, HERE, explicit) == Found("cpu", explicit, "explicit")
    assert lookup(problem, HERE, explicit.to_dict()).schedule == explicit


def test_records_of_something_else_never_apply(store: Store) -> None:
    problem = a_problem()
    store(a_problem(8192), HERE, 32)
    store(a_problem(causal=True), HERE, 32)
    store(a_problem(head_dim_v=32), HERE, 32)
    store(a_problem(dtype="float16"), HERE, 32)
    store(problem, OTHER_LEVEL, 32)
    store(problem, HERE, 32, where="home", program="0" * 12)
    found = lookup(problem, HERE)
    assert found.origin == "default"
    assert len(found.notes) == 2
    assert "another version of the kernel" in found.notes[0]
    assert "x86-64-v4" in found.notes[1]


def test_record_of_another_compiler_never_applies(store: Store) -> None:
    store(a_problem(), HERE, 32, versions={"apache-tvm": "0.1.0"})
    assert lookup(a_problem(), HERE).origin == "default"


def test_nearest_sizes_win(store: Store) -> None:
    store(a_problem(600), HERE, 32)
    store(a_problem(2000), HERE, 128)
    assert origin_and_block(lookup(a_problem(1900), HERE))[1] == 128
    assert origin_and_block(lookup(a_problem(700), HERE))[1] == 32


def test_decode_and_prefill_do_not_share_a_record(store: Store) -> None:
    prefill = a_problem(4096)
    decode = dataclasses.replace(prefill, shape=Shape(1, 8, 8, 1, 4096))
    store(decode, HERE, 32)
    assert lookup(prefill, HERE).origin == "default"
    store(prefill, HERE, 128)
    assert origin_and_block(lookup(prefill, HERE))[1] == 128
    assert origin_and_block(lookup(decode, HERE))[1] == 32


def test_record_that_no_longer_parses_or_fits_is_passed_over(store: Store) -> None:
    problem = a_problem()
    store(problem, HERE, 32, where="home")
    path = home() / "schedules" / HERE.slug / "forward.jsonl"
    path.write_text(path.read_text().replace('"block_q"', '"block_gone"'))
    found = lookup(problem, HERE)
    assert found.origin == "default"
    assert "block_gone" in found.notes[0]
    path.write_text(path.read_text().replace('"block_gone": 128', '"block_q": 100'))
    found = lookup(problem, HERE)
    assert found.origin == "default"
    assert "does not fit here" in found.notes[0]


def test_corrupt_line_warns_with_file_and_line_once(store: Store) -> None:
    problem = a_problem()
    store(problem, HERE, 32, where="home")
    path = home() / "schedules" / HERE.slug / "forward.jsonl"
    path.write_text("{half\n" + path.read_text())
    with pytest.warns(RuntimeWarning, match=r"forward\.jsonl:1 is no tuned record"):
        assert origin_and_block(lookup(problem, HERE)) == ("user overlay", 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lookup(problem, HERE).origin == "user overlay"


def test_a_new_verdict_is_seen_at_once(store: Store) -> None:
    problem = a_problem()
    store(problem, HERE, 32, where="home")
    assert origin_and_block(lookup(problem, HERE))[1] == 32
    store(problem, HERE, 128, where="home")
    assert origin_and_block(lookup(problem, HERE))[1] == 128


def test_alternating_keys_do_not_leak(store: Store) -> None:
    """BUGS I06 (triton !1242): the choice of one key leaked into the next one's."""
    short, long = a_problem(256), a_problem(8192)
    store(short, HERE, 32)
    store(long, HERE, 256)
    for _ in range(10):
        assert origin_and_block(lookup(short, HERE))[1] == 32
        assert origin_and_block(lookup(long, HERE))[1] == 256


def test_tune_two_sizes_then_restart(store: Store) -> None:
    """BUGS I07: a second process finds both results, each for its own size."""
    store(a_problem(512), HERE, 32, where="home")
    store(a_problem(8192), HERE, 256, where="home")
    code = (
        "from fa2tvm.lookup import lookup; from fa2tvm.device import baseline; "
        "from fa2tvm.problem import Problem, Shape, Variant; "
        "v = Variant('forward', 'float32', 64, 64); "
        "print(*(lookup(Problem(v, Shape(1, 8, 8, n, n)), baseline()).schedule.block_kv "
        "for n in (512, 8192, 1024)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    default = CpuForward.default(a_problem().variant, HERE).block_kv
    assert done.stdout.split() == ["32", "256", str(default)]


def test_infeasible_explicit_schedule_is_refused() -> None:
    wrong = dataclasses.replace(CpuForward.default(a_problem().variant, HERE), block_q=100)
    with pytest.raises(InfeasibleSchedule, match="block_q"):
        lookup(a_problem(), HERE, wrong)


def test_device_without_a_family_is_refused() -> None:
    quantum = dataclasses.replace(HERE, kind="quantum")
    with pytest.raises(UnsupportedProblem, match="quantum"):
        lookup(a_problem(), quantum)


def test_lookup_needs_no_tvm() -> None:
    code = (
        "import sys; from fa2tvm.lookup import lookup; from fa2tvm.device import detect; "
        "from fa2tvm.problem import Problem, Shape, Variant; "
        "lookup(Problem(Variant('forward', 'float32', 64, 64), Shape(1, 1, 1, 9, 9)), detect()); "
        "assert not {'tvm', 'tvm_ffi'} & set(sys.modules), 'tvm was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_shipped_root_holds_both_folders() -> None:
    assert (shipped_root() / "schedules").is_dir()
    assert (shipped_root() / "tuning_logs").is_dir()
