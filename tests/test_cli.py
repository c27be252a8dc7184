"""The command line: what it prints, and how it says no."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fa2tvm
from fa2tvm.cli import app
from fa2tvm.cli.options import problems_of
from fa2tvm.errors import InfeasibleSchedule, UnsupportedProblem
from fa2tvm.workloads import TAGS, named

SMALL = "d64_b1_h2_q64"


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def passed(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.output)


def test_version() -> None:
    assert passed("--version") == f"fa2tvm {fa2tvm.__version__}\n"


def test_help_is_quick_and_imports_neither_torch_nor_tvm() -> None:
    code = (
        "import sys; from fa2tvm.cli import app\n"
        "assert not {'torch', 'tvm', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("explain", "nonsense"), "nonsense"),
        (("explain",), "no problem is given"),
        (("explain", "--causal"), "--seq-q is missing"),
        (("explain", "--seq-q", "8", "--heads", "3", "--heads-kv", "2"), "heads_q is 3"),
        (("explain", "--seq-q", "8", "--head-dim", "513"), "head_dim_qk is 513"),
        (("explain", SMALL, "--dtype", "float64"), "float64"),
        (("explain", SMALL, "--pass", "sideways"), "sideways"),
        (("explain", SMALL, "--device", "x86-64-v9"), "x86-64-v9"),
        (("explain", "--tag", "nothing"), "nothing"),
        (("explain", "--dtype", "float16"), "name one or pass --tag"),
        (("bench", SMALL, "--peer", "nobody"), "nobody"),
        (("bench", SMALL, "--calls"), "choose one"),
        (("bench", "--report", "absent.jsonl"), "absent.jsonl"),
        (("tune", "nonsense"), "nonsense"),
        (("tune", SMALL, "--trials", "0"), "trials is 0"),
        (("tune", SMALL, "--seconds", "nan"), "seconds is nan"),
        (("tune", SMALL, "--seed", "-1"), "seed is -1"),
        (("tune", SMALL, "--out", "/proc/nowhere"), "/proc/nowhere"),
        (("promote", SMALL, "--top", "0"), "top is 0"),
        (("promote", SMALL, "--rounds", "-1"), "rounds is -1"),
        (("promote", SMALL, "--logs", "/proc/nowhere"), "/proc/nowhere"),
        (("export", "nonsense", "--out", "x"), "nonsense"),
        (("bench", SMALL, "--threads", "0"), "threads is 0"),
        (("bench", SMALL, "--seconds", "-1"), "seconds is -1"),
        (("viz", "--block-q", "0"), "block_q is 0"),
        (("viz", "--out", "/proc/nowhere/page.html"), "/proc/nowhere"),
        (("report", "tune", "/proc/nowhere"), "no tuning log"),
        (("report", "bench", "/proc/nowhere"), "no rows"),
        (("schedules", "--device", "abacus"), "abacus"),
    ],
)
def test_errors_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.startswith("fa2tvm: ")
    assert result.stderr.count("\n") == 1
    assert not isinstance(result.exception, UnsupportedProblem)


def test_problems_by_name_and_by_flags_are_the_same() -> None:
    by_name = problems_of(["d64_causal_b2_h8k2_q100_k200_topleft"], pass_=["forward"])
    by_flags = problems_of(
        None,
        seq_q=100,
        seq_kv=200,
        batch=2,
        heads=8,
        heads_kv=2,
        causal=True,
        top_left=True,
        pass_=["forward"],
    )
    assert by_name == by_flags
    assert problems_of([by_name[0].name]) == by_name


def test_names_passes_and_dtypes_multiply() -> None:
    found = problems_of(["gpt2_small", "bert_base"], dtype=["float16", "float32"])
    assert len(found) == 8
    assert problems_of(["gpt2_small"], pass_=["backward"]) == [
        named("gpt2_small").problem("backward", "float32")
    ]
    assert problems_of(None, tag="tiny")


def test_doctor_names_device_versions_and_fallbacks() -> None:
    text = passed("doctor")
    for part in ("name here", "thread pool", "apache-tvm", "linker", "cache", "forward, default"):
        assert part in text


def test_explain_names_origin_decisions_and_footprint() -> None:
    text = passed("explain", SMALL, "--pass", "forward")
    for part in ("schedule from", "default", "block_q", "one task", "GFLOP", "MiB"):
        assert part in text


def test_explain_prints_the_programs() -> None:
    text = passed("explain", SMALL, "--pass", "forward", "--tir", "--llvm", "--asm")
    assert "T.prim_func" in text
    assert "define" in text
    assert ".text" in text


def test_explain_for_another_device() -> None:
    assert "cpu_x86_64_v3" in passed("explain", SMALL, "--device", "x86-64-v3")


def test_schedules_lists_problems_by_tag() -> None:
    text = passed("schedules", "--problems")
    for tag in TAGS:
        assert f"{tag}: " in text
    assert "gpt2_small" in text


def test_export_makes_a_pack_that_runs_without_the_compiler(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    passed("export", SMALL, "--out", str(pack))
    code = f"""
import sys, torch, fa2tvm
fa2tvm.use_pack({str(pack)!r})
q, k, v = (torch.randn(3, 10, 4, 64, requires_grad=True) for _ in range(3))
out = fa2tvm.attention(q, k, v)
out.sum().backward()
want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
torch.testing.assert_close(out, want.transpose(1, 2))
assert q.grad is not None and "tvm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_bench_writes_rows_table_and_picture(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    text = passed(
        "bench", SMALL, "--pass", "forward", "--peer", "fa2tvm", "--peer", "sdpa-flash",
        "--seconds", "0", "--out", str(rows),
    )  # fmt: skip
    assert "geometric mean" in text
    for suffix in (".jsonl", ".csv", ".png"):
        assert rows.with_suffix(suffix).stat().st_size > 0
    picture = tmp_path / "again.png"
    again = passed("bench", "--report", str(rows), "--plot", str(picture))
    assert "geometric mean" in again
    assert picture.exists()


def test_a_job_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa2tvm.tune import job

    class Result:
        message, folder, stopped = "done", Path("log"), "trials"

        def __init__(self, problem: Any) -> None:
            self.problem = problem

    def tune(groups: Any, _: Any, finished: Any, **__: Any) -> None:
        assert [len(group) for group in groups] == [1, 2]
        finished(0, InfeasibleSchedule("the default schedule failed."))
        finished(1, [Result(problem) for problem in groups[1]])

    monkeypatch.setattr(job, "tune_beside", tune)
    result = run("tune", "d64_causal_b1_h2_q64", SMALL, "d64_b1_h2_q96", "--pass", "forward")
    assert result.exit_code == 2
    assert "fa2tvm: the default schedule failed." in result.stderr
    assert result.stdout.count("done") == 2


def test_what_jobs_begin_with_is_built_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--only-build` names a GPU that is not here, tunes nothing and says what was refused."""
    from fa2tvm.schedule import SCHEDULES
    from fa2tvm.tune import job
    from fa2tvm.tune.nouns import Failure

    def build(groups: Any, device: Any, seed: int, options: Any, *_: Any) -> dict[Any, Any]:
        assert (device.slug, seed, options.overlap) == ("nvidia_h200", 3, True)
        variant = groups[0][0].variant
        first, second, *_ = SCHEDULES["sm90", "forward"].hand_picked(groups[0][0], device)
        return {(variant, first): Path("made"), (variant, second): Failure("build", "too wide")}

    monkeypatch.setattr(job, "build_first", build)
    monkeypatch.setattr(job, "tune_beside", lambda *_, **__: pytest.fail("it tuned"))
    sizes = ("d64_b1_h2_q64", "--pass", "forward", "--dtype", "bfloat16", "--seed", "3")
    result = run("tune", *sizes, "--device", "nvidia_h200", "--only-build")
    assert result.exit_code == 0
    assert "1 of 2 modules are in the cache" in result.stdout
    assert "too wide" in result.stderr


def test_tune_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fa2tvm.tune import job

    asked: dict[str, Any] = {}

    class Result:
        message, folder, stopped = "Stopped after 3 trials.", tmp_path, "trials"
        problem = named(SMALL).problem("backward", "float32")

    def tune(groups: Any, device: Any, finished: Any, **options: Any) -> None:
        asked.update(options, problems=groups[0], device=device)
        options["progress"](0, job.Progress("timing", 3, 1, 5, 1500.0, 3000.0, 12.0, 61.0))
        finished(0, [Result()])

    monkeypatch.setattr(job, "tune_beside", tune)
    text = passed(
        "tune", SMALL, "--pass", "backward", "--trials", "5", "--seed", "7", "--fresh",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert asked["problems"] == [named(SMALL).problem("backward", "float32")]
    assert (asked["trials"], asked["seconds"], asked["seed"]) == (5, None, 7)
    assert asked["resume"] is False
    for part in ("5 trials", "1 failed", "1.5 ms", "2.00 x the default", "12 GFLOP/s", "1:01 left"):
        assert part in text
    assert "Stopped after 3 trials." in text
