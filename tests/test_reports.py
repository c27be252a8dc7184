"""The reports: every figure on the pages is one of the rows' or of the log's, and nothing mixes."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import browser, why_absent
from typer.testing import CliRunner

from fa2tvm.bench.rows import Row, new_row, read_rows, write_rows
from fa2tvm.cli import app
from fa2tvm.device import Device, baseline, gpu
from fa2tvm.errors import CorruptRecord
from fa2tvm.problem import Problem
from fa2tvm.schedule import Schedule
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.provenance import write_job
from fa2tvm.tune.space import Space
from fa2tvm.viz import bench_groups, bench_report, tune_model, tune_report
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
    assert all(path.parent == tmp_path / "bench" for path in pictures)
    for expected in (
        "Test CPU",
        "c" * 12,
        "2026-11-30",
        "flash_attn is not installed.",
        "v1",
        "v2",
    ):
        assert expected in text
    _, _, all_peers = text.partition("<summary>Every peer</summary>")
    ratios = re.findall(r"<td style[^>]*>(\d\.\d\d)</td>", text)
    # The fastest peer in the heat maps, then every peer.
    assert (ratios.count("0.50"), ratios.count("1.50"), len(ratios)) == (32, 16, 48)
    assert "1.50" in all_peers
    names = {path.name for path in pictures}
    rates = {"1_rate_float32_forward.png", "1_rate_float32_backward.png"}
    assert names == rates | {"overview.png", "1_share.png", "1_roofline.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert "20 GB/s" in text
    assert "The peak of float32: 200 GFLOP/s, measured in the same runs." in text


def shown_share(text: str) -> str:
    """Our share of the peak in the overview."""
    (share,) = re.findall(r"<td>([\d.]+–[\d.]+)</td><td>", text.partition("<h3")[0])
    return str(share)


def test_a_gpu_without_peaks_of_its_own_is_measured_against_other_runs(tmp_path: Path) -> None:
    gpu = {"device": "nvidia_h200", "device_name": "NVIDIA H200", "threads": None, "cuda": "13.0"}
    rows = [
        r | {"dtype": "bfloat16"}
        for r in rows_of_one_run(**gpu, peak_gflops=None, memory_gbs=None)
        if r["pass"] == "forward"
    ]
    ours = [r["tflops"] for r in rows if r["peer"] == "fa2tvm"]
    page, *_ = bench_report.write(rows, tmp_path / "bench.html")
    # The papers' shares are of the data sheet, so ours are too; the roofline is measured.
    assert shown_share(page.read_text()) == f"{min(ours) / 9.894:.0f}–{max(ours) / 9.894:.0f}"
    assert "some are not known for these rows" in page.read_text()
    peaks = {"peak_gflops": 10_000 * max(ours), "sustained_gflops": 7.0, "memory_gbs": 4000.0}
    other = rows_of_one_run(**gpu | peaks | {"commit": "d" * 40})
    page, *_ = bench_report.write(rows + other, tmp_path / "bench.html")
    text = page.read_text()
    assert f"reaches {10 * max(ours):.1f} TFLOP/s, measured in other runs" in text
    assert "4.00 TB/s" in text
    sustained = [r | {"mode": "sustained"} for r in other]
    (group,) = bench_groups.groups(sustained)
    assert group.ceilings["float32"].peak_gflops == 7
    unknown = [r | {"run": r["run"] | {"device": "nvidia_x", "device_name": "X"}} for r in rows]
    page, *_ = bench_report.write(unknown, tmp_path / "bench.html")
    assert "No peak is known" in page.read_text()


def test_rows_of_another_script_are_read_as_they_are(tmp_path: Path) -> None:
    """They lack `what`, `workload` and more, and name a device and a short commit in their way."""
    ours = rows_of_one_run()
    kept = {"peer", "family", "pass", "mode", "dtype", "head_dim", "head_dim_v", "causal", "batch"}
    kept |= {"heads_q", "heads_kv", "seq_q", "seq_kv", "us_p50", "us_p20", "us_p80", "tflops"}
    run = {"device": "NVIDIA H200", "torch": "1", "tvm": "2", "fa2tvm_commit": "9119bea"}
    run |= {"dirty": False, "date": "2026-11-30"}
    theirs = [
        {key: r[key] for key in kept} | {"rel_err": 0.0, "error": r["error"], "run": run}
        for r in ours
    ]
    text = "".join(json.dumps(r) + "\n" for r in theirs)
    for name in ("forward", "forward_sweep"):
        (tmp_path / f"{name}.jsonl").write_text(text)
    rows = read_rows(tmp_path)
    assert {r["workload"] for r in rows} == {
        parse(r["workload"]).problem("forward", "float32").name.removeprefix("forward_float32_")
        for r in ours
    }
    (group,) = bench_groups.groups(rows)
    assert group.title == "NVIDIA H200, kernels alone, burst, commit 9119bea"
    assert len(group.rows) == len(ours)
    page, *_ = bench_report.write(rows, tmp_path / "bench.html")
    assert f"{len(ours)} rows of sweeps, which choose a schedule, are left out." in page.read_text()


def test_several_schedules_of_one_problem_are_said_and_the_fastest_stands(tmp_path: Path) -> None:
    rows = rows_of_one_run()
    slower = [r | {"us_p50": 2 * r["us_p50"]} for r in rows if r["peer"] == "fa2tvm"]
    (group,) = bench_groups.groups(slower + rows)
    assert group.repeats == 2
    (alone,) = bench_groups.groups(rows)
    assert bench_groups.ratios(group.timed) == bench_groups.ratios(alone.timed)
    slower = [r | {"schedule": {"block_kv": 32, "stages": 2}} for r in slower]
    faster = [r | {"schedule": {"block_kv": 64, "stages": 2}} for r in rows]
    page, *_ = bench_report.write(slower + faster, tmp_path / "bench.html")
    text = page.read_text()
    assert "measured up to 2 times" in text
    lines = re.findall(r'<th scope="row">block_kv=32</th>(.*?)</tr>', text)
    # Two head dims, two masks and two passes have a table each, with two lengths.
    assert [re.findall(r">([\d.]+)<", line) for line in lines] == [["2.00"] * 2] * 8


def test_families_of_ours_stand_apart_beside_all_peers() -> None:
    rows = [
        r | {"family": family if r["peer"] == "fa2tvm" else None, "us_p50": r["us_p50"]}
        for family in ("sm80", "sm90")
        for r in rows_of_one_run()
    ]
    first, second = bench_groups.groups(rows)
    assert (first.facts[-1], second.facts[-1]) == ("family sm80", "family sm90")
    for group, family in ((first, "sm80"), (second, "sm90")):
        assert {r["family"] for r in group.timed if r["peer"] == "fa2tvm"} == {family}
        assert {r["peer"] for r in group.timed} == {"fa2tvm", "sdpa", "eager"}


def test_variants_of_one_program_are_compared_with_the_first(tmp_path: Path) -> None:
    names = {"fa2tvm": "v2", "sdpa": "split-K", "eager": "per-step"}
    rows = [r | {"peer": names[r["peer"]]} for r in rows_of_one_run() if r["us_p50"]]
    page, *_ = bench_report.write(rows, tmp_path / "bench.html")
    text = page.read_text()
    assert "Time over that of v2" in text
    ratios = re.findall(r"<td style[^>]*>(\d\.\d\d)</td>", text)
    assert (ratios.count("0.50"), ratios.count("1.50"), len(ratios)) == (16, 16, 32)
    assert "fastest peer over ours" not in text.partition('id="group-1"')[2]


def test_calls_are_a_table_of_times(tmp_path: Path) -> None:
    calls = [r | {"tflops": None, "cpu_us_p50": 7.0} for r in rows_of_one_run()]
    page, *pictures = bench_report.write(calls, tmp_path / "bench.html")
    assert "Time of a call" in page.read_text()
    assert not pictures


@pytest.mark.parametrize(
    "other", [{"device": "cpu_other"}, {"commit": "d" * 40}, {"dirty": True}, {"threads": 1}]
)
def test_rows_of_different_runs_are_kept_apart(other: dict[str, Any]) -> None:
    rows = rows_of_one_run() + rows_of_one_run(**other)
    first, second = bench_groups.groups(rows)
    assert len(first.rows) == len(second.rows) == len(rows) // 2


def test_groups_have_pictures_of_their_own(tmp_path: Path) -> None:
    rows = [r for device in ("cpu_a", "cpu_b") for r in rows_of_one_run(device=device)]
    forward = [r for r in rows if r["pass"] == "forward" and not r["causal"]]
    page, *pictures = bench_report.write(forward, tmp_path / "bench.html")
    assert re.findall(r'<h2 id="(.*?)"', page.read_text()) == ["group-1", "group-2"]
    assert "2 groups that are never mixed" in page.read_text()
    assert len({path.name for path in pictures}) == 7


def test_modes_are_kept_apart() -> None:
    rows = rows_of_one_run()
    sustained = [r | {"mode": "sustained"} for r in rows_of_one_run()]
    parts = bench_groups.groups(rows + sustained)
    assert [g.rows[0]["mode"] for g in parts] == ["burst", "sustained"]
    assert len(parts[0].rows) == len(rows)


def test_rows_without_a_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptRecord, match="no row holds a time"):
        bench_report.write([row("d64_q16", "fa2tvm", None)], tmp_path / "bench.html")


def problem() -> Problem:
    return parse("d64_h2_q512").problem("forward", "float32")


def write_log(
    folder: Path,
    cost: Callable[[Schedule], float],
    n: int = 40,
    what: Problem | None = None,
    device: Device = DEVICE,
    family: str = "cpu",
) -> Space:
    """A log of n feasible points whose times are `cost`, and one failure."""
    what = what or problem()
    space = Space.of(what, device, family)
    log = TrialLog(folder)
    write_job(folder, space, seed=0, trials=n, seconds=None)
    common = {"key": "test", "problem": what.name, "date": "2026-11-30"}
    chosen, draw = [space.default], random.Random(0)
    while len(chosen) < n:
        picks = {name: draw.choice(values) for name, values in space.choices.items()}
        point = replace(space.default, **picks)
        if point not in chosen and not space.reasons(point):
            chosen.append(point)
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
        "<td>1</td>",
        "The worker died by signal 11.",
        f"block_kv = {least}",
        log.problem.name,
        "scratch or shared memory, KiB",
    ):
        assert expected in text, expected
    names = {path.name for path in pictures}
    assert names == {"overview.png", "1_progress.png", "1_model.png", "1_importance.png"}
    assert "predicted afterwards by the same trees" in text


def test_the_log_of_a_gpu_is_reported_like_any_other(tmp_path: Path) -> None:
    what = parse("d128_causal_h16_q4096").problem("forward", "bfloat16")
    write_log(tmp_path / "job", narrow_blocks_are_fast, 30, what, gpu("nvidia_h200"), "sm90")
    page, *_ = tune_report.write([tmp_path / "job"], tmp_path / "tune.html")
    text = page.read_text()
    for expected in (what.name, "nvidia_h200 (sm_90a, 132 multiprocessors)", "family sm90"):
        assert expected in text


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


def test_predictions_of_the_log_come_before_replayed_ones(tmp_path: Path) -> None:
    write_log(tmp_path / "job", narrow_blocks_are_fast)
    path = tmp_path / "job" / "trials.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[20:]:
        row["predicted"] = 3.5
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = tune_report.read_log(tmp_path / "job")
    pairs, _ = tune_model.predictions(log.problem, log.device, log.family, log.measured)
    assert pairs == {t.trial: (3.5, 1 / t.relative) for t in log.measured[20:]}
    page, *_ = tune_report.write([tmp_path / "job"], tmp_path / "tune.html")
    assert "with the search&#x27;s own prediction" in page.read_text()


def test_trials_of_an_older_kernel_are_left_out(tmp_path: Path) -> None:
    write_log(tmp_path / "job", narrow_blocks_are_fast, n=14)
    path = tmp_path / "job" / "trials.jsonl"
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"key": "older"})
    path.write_text("\n".join(lines) + "\n")
    log = tune_report.read_log(tmp_path / "job")
    assert (log.retired, len(log.trials)) == (1, 14)


def test_a_log_of_other_decisions_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    write_log(tmp_path / "job", narrow_blocks_are_fast, n=14)
    path = tmp_path / "job" / "trials.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["decisions"]["forgotten"] = 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, *pictures = tune_report.write([tmp_path / "job"], tmp_path / "tune.html")
    text = page.read_text()
    assert "14 points of the space were tried in 15 trials" in text
    assert "left out: decision &#x27;forgotten&#x27; is unknown or missing" in text
    assert {path.name for path in pictures} == {"overview.png", "1_progress.png"}


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
    docs = Path(__file__).parent.parent / "docs"
    pages += [docs / "tuning.html", docs / "comparison.html"]
    with browser(tmp_path / "profile") as window:
        for width, scheme in ((390, "dark"), (1280, "light")):
            window.resize(width, 1600, mobile=width < 600)
            window.prefer(scheme)
            for page in pages:
                window.open(page.as_uri())
                assert window.run("return document.documentElement.scrollWidth") <= width
                assert window.unnamed() == []
                assert window.faint("p", "th", "td", "a", "summary", "h2", "h3", "h4") == []
                dead = "return [...document.querySelectorAll('a')].filter(a => !document."
                assert window.run(dead + "getElementById(a.hash.slice(1))).length") == 0
                folder = os.environ.get("FA2TVM_SCREENSHOTS")
                if folder:
                    path = Path(folder) / f"{page.parent.name}_{page.stem}_{width}_{scheme}.png"
                    path.write_bytes(window.screenshot())
        assert not window.messages()


def test_ready_pages_are_whole_and_small() -> None:
    """What the README shows is there, takes nothing from the network, and is quick to load."""
    root = Path(__file__).parent.parent
    text = (root / "README.md").read_text()
    shown = set(re.findall(r"""(?:\]\(|src=")((?:docs|benchmarks|fa2tvm)/[^)"#]+)""", text))
    assert {f"docs/{name}.html" for name in ("visualizer", "tuning", "comparison")} <= shown
    for name in shown:
        assert (root / name).is_file(), name
    for picture in (name for name in shown if name.endswith(".png")):
        assert (root / picture).stat().st_size < 200_000, picture
    for page in (root / "docs").glob("*.html"):
        html = page.read_text(encoding="utf-8")
        outside = re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*|@import|url\((?!#)""", html)
        assert not outside, page
        assert len(html) < 2_000_000, page
