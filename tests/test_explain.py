"""explain: runners-up come from the record's own log, and machine code is counted right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_reports import DEVICE, narrow_blocks_are_fast, problem, write_log

from fa2tvm.lookup import Found
from fa2tvm.records import Record, device_summary
from fa2tvm.viz import explain
from fa2tvm.viz.tune_report import read_log

ASSEMBLY = """
main:
	.cfi_startproc
	vmovups	%zmm0, 64(%rsp)
	vmovups	64(%rsp), %zmm1
	vmovups	(%rdi), %zmm2
.LBB0_1:
	vfmadd231ps	%zmm1, %zmm2, %zmm31	# a comment
	vfmadd231ps	(%rax){1to16}, %zmm2, %zmm3
	addq	$64, %rax
	jne	.LBB0_1
	retq
"""


def test_machine_code_is_counted() -> None:
    facts = dict(explain.code_facts(ASSEMBLY))
    assert facts["instructions"].startswith("8: vector move 38 %, multiply-add 25 %")
    assert "scalar 12 %" in facts["instructions"]
    assert facts["vector registers"] == "5 in use"
    assert facts["stack"] == "1 vector spills, 1 reloads"
    assert dict(explain.code_facts(""))["instructions"] == "none"


@pytest.fixture
def found(fa2tvm_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Found:
    """A tuned answer whose log lies in the user's home."""
    del fa2tvm_home
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path))
    folder = tmp_path / "tuning_logs" / "cpu_test" / "forward" / "job"
    space = write_log(folder, narrow_blocks_are_fast)
    best = read_log(folder).best
    record = Record(
        problem=problem(),
        family="cpu",
        decisions=best.decisions,
        us=1.0,
        us_default=2.0,
        device=device_summary(DEVICE),
        program="test",
        versions={},
        date="2026-11-30",
        log=f"cpu_test/forward/job#{best.trial}",
    )
    return Found("cpu", space.default, "user overlay", record)


def test_runners_up_come_from_the_log(found: Found) -> None:
    facts = explain.runners_up(found, count=2)
    assert [name for name, _ in facts] == ["search's best", "runner-up 1", "runner-up 2"]
    ratios = [float(text.split(" x ")[0]) for _, text in facts]
    assert ratios == sorted(ratios, reverse=True)
    assert json.dumps(facts).count("block_kv=") == 3


def test_predictions_stand_beside_measurements(found: Found) -> None:
    facts = explain.runners_up(found, count=100)
    assert sum("predicted" in text for _, text in facts) == 40 - 12


def test_no_log_no_runners_up(
    found: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path / "elsewhere"))
    assert explain.runners_up(found) == []
    assert explain.runners_up(Found("cpu", found.schedule, "default")) == []
