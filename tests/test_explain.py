"""explain: runners-up come from the record's own log, and machine code is counted right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_reports import DEVICE, narrow_blocks_are_fast, problem, write_log

from fa2tvm import cuda_toolchain
from fa2tvm.device import gpu
from fa2tvm.lookup import Found, lookup
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.records import Record, device_summary
from fa2tvm.viz import explain, explain_cuda
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


def test_runners_up_come_from_the_log(found: Found, tmp_path: Path) -> None:
    facts = explain.tuned_facts(found, runners_up=2)
    names = [name for name, _ in facts]
    expected = ["tuned for", "measured", "in the search", "evidence", "runner-up 1", "runner-up 2"]
    assert names == expected
    own, *others = (float(t.split(" x ")[0]) for n, t in facts if n[:2] in ("in", "ru"))
    assert own >= others[0] >= others[1]
    log = read_log(tmp_path / "tuning_logs" / "cpu_test" / "forward" / "job")
    winner = json.dumps(log.best.decisions)
    for name, text in facts[-2:]:
        differing = text.partition(": ")[2].split()
        assert differing, name
        for choice in differing:
            decision, _, value = choice.partition("=")
            assert f'"{decision}": {value}' not in winner


def test_predictions_stand_beside_measurements(found: Found) -> None:
    facts = explain.tuned_facts(found, runners_up=100)
    assert sum("predicted" in text for _, text in facts) == 40 - 12


def test_without_its_log_a_record_says_so(
    found: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path / "elsewhere"))
    assert dict(explain.tuned_facts(found))["evidence"].endswith("which is not here")
    assert explain.tuned_facts(Found("cpu", found.schedule, "default")) == []


SASS = """
        Function : attention_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017b82 */
                                                             /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/                   MUFU.EX2 R3, R3 ;
        /*0050*/                   FFMA.FTZ R3, R3, R4, R5 ;
        /*0060*/             @!UP0 UIADD3 UR5, UR5, 0x1, URZ ;
        /*0070*/                   STL [R1], R3 ;
        /*0080*/                   NOP ;
"""


def test_sass_is_counted() -> None:
    facts = dict(explain_cuda.sass_facts(SASS))
    assert facts["instructions"].startswith("8: ")
    for kind in (
        "tensor core 25 %",
        "exponential 12 %",
        "global memory 12 %",
        "local memory (spills) 12 %",
    ):
        assert kind in facts["instructions"]
    assert facts["matrix instructions"] == "2 HGMMA"


@pytest.mark.skipif(
    cuda_toolchain.describe_compiler() is None, reason="no CUDA compiler: pip install fa2tvm[cuda]"
)
def test_a_cuda_schedule_is_explained_without_a_gpu() -> None:
    device, variant = gpu("nvidia_h200"), Variant("forward", "bfloat16", 64, 64, False)
    found = lookup(Problem(variant, Shape(1, 2, 2, 256, 256)), device)
    code = explain_cuda.compile_code(variant, found.schedule, device)
    facts = dict(explain_cuda.facts(code, variant, found.schedule, device))
    assert "__global__" in code.source
    threads = found.schedule.footprint(variant, device).threads
    assert 32 <= code.registers <= min(255, 65536 // threads)
    assert facts["spills"] == "none"
    assert facts["shared memory"].endswith("of 227 KiB that a block may use")
    if code.sass is None:
        assert "cuobjdump is missing" in facts["instructions"]
    else:
        assert re.fullmatch(r"\d+ HGMMA", facts["matrix instructions"])
