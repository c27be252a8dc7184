"""The reports: every figure on the pages is one of the rows' or of the log's, and nothing mixes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import browser, why_absent
from typer.testing import CliRunner

from fa2tvm.bench.rows import Row, new_row, write_rows
from fa2tvm.cli import app
from fa2tvm.device import baseline
from fa2tvm.errors import CorruptRecord
from fa2tvm.problem import Problem
from fa2tvm.schedule import Schedule
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.provenance import write_job
from fa2tvm.tune.space import Space
from fa2tvm.viz import bench_report, tune_model, tune_report
from fa2tvm.workloads import parse

RUN = {
    "device": "cpu_test",
    "device_name": "Test CPU",
    "threads": 2,
    "peak_gflops": 200.0,
    "memory_gbs": 20.0,
    "torch": "1",
    "tvm": "2",
    "fa2tvm": "3",
    "commit": "c" * 40,
    "dirty": False,
    "date": "2026-11-30",
}
DEVICE = baseline("x86-64-v3")


def row(text: str, peer: str, us: float | None, pass_: Any = "forward", **run: Any) -> Row:
    problem = parse(text).problem(pass_, "float32")
    made = new_row("cpu", text, peer, "burst", problem)
    if us is None:
        made["error"] = f"{peer} is not installed."
    else:
        made.update(us_p50=us, us_p20=us, us_p80=us, tflops=problem.flops() / us / 1e6)
    made["run"] = RUN | run
    return made


def rows_of_one_run(**run: Any) -> list[Row]:
    return [
        row(f"d{d}{mask}_h2_q{n}", peer, us * n, pass_, **run)
        for d in (64, 128)
        for mask in ("", "_causal")
        for n in (512, 2048)
        for pass_ in ("forward", "backward")
        for peer, us in (("fa2tvm", 2.0), ("sdpa", 3.0), ("eager", 1.0))
    ] + [row("d64_h2_q512", "flash_attn", None, **run)]


def test_comparison_shows_ratios_absences_and_provenance(tmp_path: Path) -> None:
    page, *pictures = bench_report.write(rows_of_one_run(), tmp_path / "bench.html")
    text = page.read_text()
    for expected in (
        "Test CPU",
        "c" * 12,
        "2026-11-30",
        "flash_attn is not installed.",
        "v1",
        "v2",
    ):
        assert expected in text
    ratios = re.findall(r"<td[^>]*>(\d\.\d\d)</td>", text)
    assert ratios.count("1.50") == ratios.count("0.50") == len(ratios) // 2 == 16
    names = {path.name.removeprefix("bench_") for path in pictures}
    rates = {"rate_float32_forward.png", "rate_float32_backward.png"}
    assert names == rates | {"share.png", "roofline.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert "memory 20 GB/s" in text


@pytest.mark.parametrize(
    "other", [{"device": "cpu_other"}, {"commit": "d" * 40}, {"dirty": True}, {"threads": 1}]
)
def test_rows_of_different_runs_are_kept_apart(other: dict[str, Any]) -> None:
    rows = rows_of_one_run() + rows_of_one_run(**other)
    first, second = bench_report.groups(rows)
    assert len(first.rows) == len(second.rows) == len(rows) // 2


def test_groups_have_pictures_of_their_own(tmp_path: Path) -> None:
    rows = [r for device in ("cpu_a", "cpu_b") for r in rows_of_one_run(device=device)]
    forward = [r for r in rows if r["pass"] == "forward" and not r["causal"]]
    page, *pictures = bench_report.write(forward, tmp_path / "bench.html")
    assert page.read_text().count("<h2>") == 2
    assert "2 groups that are never mixed" in page.read_text()
    assert len({path.name for path in pictures}) == 6


def test_modes_are_kept_apart() -> None:
    rows = rows_of_one_run()
    sustained = [r | {"mode": "sustained"} for r in rows_of_one_run()]
    assert [g.mode for g in bench_report.groups(rows + sustained)] == ["burst", "sustained"]


def test_rows_without_a_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptRecord, match="no row holds a rate"):
        bench_report.write([row("d64_q16", "fa2tvm", None)], tmp_path / "bench.html")


def problem() -> Problem:
    return parse("d64_h2_q512").problem("forward", "float32")


def write_log(folder: Path, cost: Callable[[Schedule], float], n: int = 40) -> Space:
    """A log of n feasible points whose times are `cost`, and one failure."""
    space = Space.of(problem(), DEVICE, "cpu")
    log = TrialLog(folder)
    write_job(folder, space, seed=0, trials=n, seconds=None)
    common = {"key": "test", "problem": problem().name, "date": "2026-11-30"}
    points = [space.default]
    for name, values in space.choices.items():
        for value in values:
            for base in list(points):
                point = replace(base, **{name: value})
                if point not in points and not space.reasons(point):
                    points.append(point)
    # Every 7th: neighbours differ in one decision only.
    chosen = [points[(7 * k) % len(points)] for k in range(n)]
    default = cost(space.default)
    for schedule in chosen:
        us = cost(schedule)
        times = {"us": us, "us_default": default, "runs_us": (us,), "error": None, "reason": None}
        log.append(decisions=schedule.to_dict(), **times, **common)
    failure = {"error": "crash", "reason": "The worker died by signal 11.", "runs_us": ()}
    log.append(decisions=space.default.to_dict(), us=None, us_default=None, **failure, **common)
    return space


def narrow_blocks_are_fast(schedule: Schedule) -> float:
    return 100.0 + schedule.to_dict()["block_kv"]


def test_tuning_report_shows_what_the_log_holds(tmp_path: Path) -> None:
    space = write_log(tmp_path / "job", narrow_blocks_are_fast)
    page, *pictures = tune_report.write([tmp_path / "job"], tmp_path / "tune.html")
    text = page.read_text()
    log = tune_report.read_log(tmp_path / "job")
    least = min(space.choices["block_kv"])
    want = (100 + space.default.to_dict()["block_kv"]) / (100 + least)
    assert 1 / log.best.relative == pytest.approx(want)
    for expected in (
        f"{want:.2f} times as fast",
        f"{space.size} points",
        "1 trials failed",
        "The worker died by signal 11.",
        f"block_kv = {least}",
        log.problem.name,
        "scratch, KiB",
    ):
        assert expected in text, expected
    names = {path.name for path in pictures}
    assert names == {"tune_progress.png", "tune_model.png", "tune_importance.png"}


def test_the_replayed_model_finds_the_decision_that_matters(tmp_path: Path) -> None:
    write_log(tmp_path / "job", narrow_blocks_are_fast)
    log = tune_report.read_log(tmp_path / "job")
    known = (log.problem, log.device, log.family, log.measured)
    assert tune_model.rank_correlation(tune_model.replay(*known)) > 0.9
    shares = dict(tune_model.importance(*known))
    assert sum(shares.values()) == pytest.approx(1)
    assert max(shares, key=lambda name: shares[name]) in {"block_kv", "block_flops", "block_bytes"}


def test_a_prediction_sees_no_later_trial(tmp_path: Path) -> None:
    write_log(tmp_path / "job", narrow_blocks_are_fast)
    log = tune_report.read_log(tmp_path / "job")
    whole = tune_model.replay(log.problem, log.device, log.family, log.measured)
    half = tune_model.replay(log.problem, log.device, log.family, log.measured[:28])
    assert whole[: len(half)] == half


def test_trials_of_an_older_kernel_are_left_out(tmp_path: Path) -> None:
    write_log(tmp_path / "job", narrow_blocks_are_fast, n=14)
    path = tmp_path / "job" / "trials.jsonl"
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"key": "older"})
    path.write_text("\n".join(lines) + "\n")
    log = tune_report.read_log(tmp_path / "job")
    assert (log.retired, len(log.trials)) == (1, 14)


def test_a_short_log_says_why_it_has_no_model(tmp_path: Path) -> None:
    write_log(tmp_path / "job", narrow_blocks_are_fast, n=3)
    (page, *_) = tune_report.write([tmp_path / "job"], tmp_path / "tune.html")
    assert "had nothing to learn from" in page.read_text()


def test_commands_write_the_pages(tmp_path: Path) -> None:
    write_log(tmp_path / "logs/a", narrow_blocks_are_fast, n=5)
    write_log(tmp_path / "logs/b", narrow_blocks_are_fast, n=5)
    write_rows(rows_of_one_run(), tmp_path / "rows.jsonl")
    commands = {
        "viz.html": ["viz", "--seq-q", "6", "--mask", "top_left"],
        "tune.html": ["report", "tune", str(tmp_path / "logs")],
        "bench.html": ["report", "bench", str(tmp_path / "rows.jsonl")],
    }
    for name, command in commands.items():
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        assert "</html>" in (tmp_path / name).read_text()
    assert '"seq_kv":6' in (tmp_path / "viz.html").read_text()
    assert "Overview" in (tmp_path / "tune.html").read_text()


@pytest.mark.parametrize("command", [["report", "tune"], ["report", "bench"], ["viz", "--seq-q=0"]])
def test_what_is_missing_or_wrong_is_one_sentence(command: list[str], tmp_path: Path) -> None:
    where = [] if command[0] == "viz" else [str(tmp_path / "nothing")]
    done = CliRunner().invoke(app, [*command, *where, "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert done.output.startswith("fa2tvm: ")
    assert done.output.count("\n") == 1


@pytest.mark.skipif(why_absent() is not None, reason=str(why_absent()))
def test_pages_fit_the_screen(tmp_path: Path) -> None:
    """FA2TVM_SCREENSHOTS names a folder for the pictures."""
    write_log(tmp_path / "job", narrow_blocks_are_fast)
    pages = [
        tune_report.write([tmp_path / "job"], tmp_path / "tune.html")[0],
        bench_report.write(rows_of_one_run(), tmp_path / "bench.html")[0],
    ]
    with browser(tmp_path / "profile") as window:
        for width, scheme in ((390, "dark"), (1280, "light")):
            window.resize(width, 1600, mobile=width < 600)
            window.prefer(scheme)
            for page in pages:
                window.open(page.as_uri())
                assert window.run("return document.documentElement.scrollWidth") <= width
                unnamed = "return document.querySelectorAll('figure:not([aria-label])').length"
                assert not window.run(unnamed)
                folder = os.environ.get("FA2TVM_SCREENSHOTS")
                if folder:
                    path = Path(folder) / f"{page.stem}_{width}_{scheme}.png"
                    path.write_bytes(window.screenshot())
        assert not window.messages()
