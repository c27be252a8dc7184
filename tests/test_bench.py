"""The benchmark: right before timed, an absent peer is a row, tables and plots from rows only."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fa2tvm.bench import calls, machine, memory, peers, suite
from fa2tvm.bench import measure as measuring
from fa2tvm.bench.check import Case, Oracle
from fa2tvm.bench.measure import Policy, measure
from fa2tvm.bench.peers import PEERS, Peer, Prepared
from fa2tvm.bench.plot import plot
from fa2tvm.bench.report import markdown
from fa2tvm.bench.rows import COLUMNS, new_row, read_rows, write_rows
from fa2tvm.errors import CompileFailed, CorruptRecord, PeerUnavailable
from fa2tvm.problem import Problem
from fa2tvm.workloads import named, parse, tagged

QUICK = Policy(seconds=0.0)
RUN = {
    "device": "cpu_test",
    "device_name": "Test CPU",
    "threads": 2,
    "peak_gflops": 200.0,
    "torch": "2",
    "tvm": "0",
    "fa2tvm": "0",
    "commit": "0123456789abcdef",
    "dirty": True,
    "date": "2026-01-01",
}


def rows_of(name: str, peer_names: list[str], passes: tuple[Any, ...] = ("forward",)) -> Any:
    rows = list(measure(parse(name), "float32", passes, peer_names, QUICK, "test", seed=3))
    return {(row["peer"], row["pass"]): row for row in rows}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register a peer that calls a function of ours."""

    def add(name: str, attention: Any, ours: bool = False) -> None:
        def prepare(_: Problem, device: str) -> Prepared:
            assert device == "cpu"
            return Prepared(attention)

        monkeypatch.setitem(PEERS, name, Peer(name, prepare, ours))

    return add


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v.double()).to(q.dtype)


def test_ours_and_sdpa_are_right_and_timed() -> None:
    rows = rows_of("d64_b1_h4k2_q96_k96", ["fa2tvm", "sdpa-flash"], ("forward", "backward"))
    for (peer, pass_), row in rows.items():
        assert row["error"] is None, row["error"]
        assert 0 < row["us_p20"] <= row["us_p50"] <= row["us_p80"]
        assert row["tflops"] > 0
        assert row["rel_err"] < 1e-5
        assert (row["family"] == "cpu") == (peer == "fa2tvm")
        assert set(COLUMNS) == set(row), pass_
    ours = rows["fa2tvm", "backward"]
    assert ours["origin"] == "default"
    assert ours["schedule"]["block_q"] > 0


def test_untuned_schedule_is_a_peer_of_its_own() -> None:
    row = rows_of("d64_b1_h2_q64", ["fa2tvm-default"])["fa2tvm-default", "forward"]
    assert row["error"] is None
    assert row["origin"] == "default"


def test_wrong_result_is_never_timed(fake: Any) -> None:
    fake("wrong", lambda q, k, v: 1.001 * exact(q, k, v))
    fake("nan", lambda q, k, v: exact(q, k, v) * float("nan"))
    rows = rows_of("d16_b1_h2_q40", ["wrong", "nan", "sdpa-math"])
    for peer in ("wrong", "nan"):
        assert rows[peer, "forward"]["us_p50"] is None
        assert "wrong" in rows[peer, "forward"]["error"]
    assert rows["sdpa-math", "forward"]["error"] is None


def test_ours_is_held_to_twice_the_plain_error(fake: Any) -> None:
    workload = parse("d16_b1_h2_q40")
    case = Case.make(workload, "float32", 3)
    _, plain = Oracle(case, "forward").errors((exact(case.q, case.k, case.v),))

    def off(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return exact(q, k, v) * (1 + 4 * plain)

    fake("ours", off, ours=True)
    fake("theirs", off)
    rows = rows_of(workload.name, ["ours", "theirs"])
    assert "wrong" in rows["ours", "forward"]["error"]
    assert rows["theirs", "forward"]["error"] is None


def test_refusal_is_a_row_with_its_reason(fake: Any) -> None:
    def refuse(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("only on Tuesdays\nand other lines")

    fake("moody", refuse)
    rows = rows_of("d16_causal_b1_h1_q8_k16", ["moody", "sdpa-flash", "sdpa-math"])
    assert rows["moody", "forward"]["error"] == "it refuses this problem: only on Tuesdays"
    assert "top-left" in rows["sdpa-flash", "forward"]["error"]


def test_backward_of_flex_is_absent_with_its_reason() -> None:
    row = rows_of("d16_b1_h1_q8", ["flex-compiled"], ("backward",))["flex-compiled", "backward"]
    assert "no backward" in row["error"]


def test_peers_take_turns(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a loaded machine one of three equal peers may look slow, and be given fewer rounds.
    monkeypatch.setattr(measuring, "_SLOW", math.inf)
    order: list[str] = []

    def noted(name: str) -> Any:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            order.append(name)
            return exact(q, k, v)

        return attention

    for name in ("a", "b", "c"):
        fake(name, noted(name))
    rows_of("d8_b1_h1_q4", ["a", "b", "c"])
    # Two calls each while checking; then a round is an untimed and a timed call of each.
    rounds = order[6:]
    firsts = [rounds[i] for i in range(0, len(rounds), 6)]
    assert firsts[:4] == ["a", "b", "c", "a"]
    assert all(rounds.count(name) == len(rounds) // 3 for name in "abc")


def test_unknown_peer_is_named() -> None:
    with pytest.raises(PeerUnavailable, match="'nobody'"):
        suite.known_peers(["nobody"])
    assert suite.known_peers([]) == [
        "fa2tvm",
        "fa2tvm-default",
        "sdpa-flash",
        "sdpa-math",
        "flex-compiled",
    ]
    with pytest.raises(PeerUnavailable, match="exist on cpu"):
        suite.known_peers(["sdpa-cudnn"])
    assert {"fa2tvm", "sdpa-cudnn", "flash-attn-3", "flash-attn-4"} <= set(
        suite.known_peers([], "cuda")
    )


def test_logits_beyond_memory_leave_math_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_available_bytes", lambda: 1000)
    row = rows_of("d8_b1_h1_q64", ["sdpa-math"])["sdpa-math", "forward"]
    assert "GiB are free" in row["error"]


def test_long_problems_are_checked_on_first_and_last_head() -> None:
    long = Case.make(parse("d1_b2_h3_q6000"), "float32", 0)
    assert long.checked_heads() == [(0, 0), (1, 2)]
    short = Case.make(parse("d1_b2_h3_q10"), "float32", 0)
    assert len(short.checked_heads()) == 6


def test_speed_table_has_the_cells_of_the_claim() -> None:
    cells = suite.speed_table()
    assert len(cells) == 3 * len(tagged("cpu")) == 36
    assert {passes for _, dtype, passes in cells if dtype != "float32"} == {("forward",)}


def test_provenance_and_peak() -> None:
    run = machine.provenance()
    assert run["peak_gflops"] > 1
    assert run["memory_gbs"] > 0.1
    for key in ("device", "device_name", "threads", "torch", "tvm", "fa2tvm", "date", "python"):
        assert run[key], key
    assert {"commit", "dirty", "driver", "cuda"} <= set(run)


def test_memory_of_a_call_is_seen() -> None:
    workload = parse("d16_b1_h1_q1024")
    logits_bytes = 4 * 1024**2
    math, _ = memory.extra_memory(workload, "float32", "forward", "sdpa-math")
    flash, output = memory.extra_memory(workload, "float32", "forward", "sdpa-flash")
    assert output == 4 * 1024 * 16
    assert math > logits_bytes > flash


def test_calls_cost_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_ROUNDS", 2)
    monkeypatch.setattr(calls, "_CALLS", 3)
    monkeypatch.setattr(calls, "_WARM_UP_S", 0.0)
    rows = list(calls.measure_calls(named("d64_b1_h1_q16_k16")))
    assert [(row["peer"], row["pass"]) for row in rows] == [
        ("fa2tvm", "forward"),
        ("sdpa", "forward"),
        ("fa2tvm", "both"),
        ("sdpa", "both"),
    ]
    assert all(row["cpu_us_p50"] > 0 for row in rows)


def test_a_peer_is_not_charged_for_the_idle_threads_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that a round leaves spinning are asleep, and its own awake, when a round is timed."""
    events: list[str] = []
    monkeypatch.setattr(calls, "_ROUNDS", 2)
    monkeypatch.setattr(calls, "_WARM_UP_S", 0.0)
    monkeypatch.setattr(calls.time, "sleep", lambda _: events.append("pause"))
    loops = {name: lambda n, name=name: events.append(f"{name} {n}") for name in "ab"}
    calls.interleave(loops, lambda: events.append("settle"))
    few, many = calls._WAKE_UP, calls._CALLS
    assert events[2:] == [
        event for x in "baab" for event in ("settle", "pause", f"{x} {few}", f"{x} {many}")
    ]


def test_a_call_that_cannot_be_made_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import fa2tvm

    def refuse(*_: Any, **__: Any) -> Any:
        raise CompileFailed("there is no compiler.")

    monkeypatch.setattr(fa2tvm, "attention", refuse)
    monkeypatch.setattr(calls, "_ROUNDS", 1)
    monkeypatch.setattr(calls, "_CALLS", 2)
    monkeypatch.setattr(calls, "_WARM_UP_S", 0.0)
    rows = list(calls.measure_calls(named("d64_b1_h1_q16_k16")))
    assert [(row["peer"], row["error"]) for row in rows[:2]] == [
        ("fa2tvm", "there is no compiler."),
        ("sdpa", None),
    ]
    text = markdown([{**row, "run": RUN} for row in rows])
    assert "fa2tvm is absent: there is no compiler." in text


def made_up_rows() -> list[dict[str, Any]]:
    """A small table: F.sdpa takes 1.5 and 6 times our time, a peer is absent."""
    rows = []
    for name, ours_us, flash_us in (
        ("d64_b4_h8_q512", 1000.0, 1500.0),
        ("d64_b1_h8_q2048", 1e4, 6e4),
    ):
        problem = parse(name).problem("forward", "float32")
        for peer, us in (("fa2tvm", ours_us), ("sdpa-flash", flash_us), ("flex-compiled", None)):
            row = new_row("cpu", name, peer, "burst", problem)
            if us is None:
                row["error"] = "it is not here."
            else:
                row.update(us_p50=us, us_p20=0.9 * us, us_p80=1.2 * us, samples=5)
                row["tflops"] = problem.flops() / us / 1e6
            rows.append({**row, "run": RUN})
    return rows


def test_report_is_made_of_the_rows() -> None:
    text = markdown(made_up_rows())
    assert "| float32, forward | 2 | 3.00 | 1.50 | 6.00 | 429–1074 |" in text
    assert "flex-compiled is absent: it is not here." in text
    assert "Test CPU (cpu_test), 2 threads" in text
    assert "0123456789ab with changes" in text
    # 4 * 4 * 8 * 512^2 * 64 FLOP in 1 ms are 2147 GFLOP/s, of a peak of 200.
    assert "| 1.00 (0.90–1.20) | 2147 | 1074 | 1.50 |" in text


def test_report_of_scaling_and_calls() -> None:
    scaling = []
    for n, us in ((512, 512**2 / 100), (1024, 1.1 * 1024**2 / 100)):
        problem = parse(f"d64_b1_h2_q{n}").problem("forward", "float32")
        row = new_row("scaling", f"n{n}", "fa2tvm", "burst", problem)
        row.update(us_p50=us, us_p20=us, us_p80=us, extra_bytes=1000 * n, output_bytes=512 * n)
        scaling.append({**row, "run": RUN})
    text = markdown(scaling)
    assert "| 10.000 | -5 % |" in text
    assert text.count("| 1000 |") == 2
    call = new_row("calls", "tiny", "sdpa", "calls", problem)
    call.update(us_p50=10.0, us_p20=9.0, us_p80=11.0, cpu_us_p50=9.5)
    assert "| tiny | forward | sdpa | 9.5 | 10.0 (9.0–11.0) |" in markdown([{**call, "run": RUN}])


def test_rows_survive_the_disk(tmp_path: Path) -> None:
    rows = made_up_rows()
    jsonl, table = write_rows(rows, tmp_path / "cpu" / "x.jsonl")
    assert read_rows(jsonl) == rows == read_rows(tmp_path)
    lines = list(csv.DictReader(table.open()))
    assert len(lines) == len(rows)
    assert lines[0]["run.device"] == "cpu_test"
    assert lines[2]["error"] == "it is not here."


@pytest.mark.parametrize("damage", ["{", "[]", json.dumps({"peer": "x"})])
def test_damaged_rows_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(damage + "\n")
    with pytest.raises(CorruptRecord, match=r"x\.jsonl:1"):
        read_rows(path)
    with pytest.raises(CorruptRecord, match="no rows"):
        read_rows(tmp_path / "absent.jsonl")


def test_plot_is_a_picture_of_the_rows(tmp_path: Path) -> None:
    path = plot(made_up_rows(), tmp_path / "speed.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CorruptRecord, match="nothing to plot"):
        plot([row for row in made_up_rows() if row["error"]], path)


def gpu_rows() -> list[dict[str, Any]]:
    """One cell of two head dims on a GPU, in both modes; a peer is absent."""
    run = RUN | {"device": "nvidia_h200", "device_name": "NVIDIA H200", "threads": None}
    run |= {"driver": "580", "cuda": "13.0", "peak_gflops": 8e5, "sustained_gflops": 6e5}
    run |= {"memory_gbs": 4200.0, "data_sheet_tflops": 1000.0}
    rows = []
    for mode, scale in (("burst", 1.0), ("sustained", 1.25)):
        for name, times in (
            ("d64_b1_h32_q4096", {"fa2tvm": 200.0, "fa2tvm-default": 220.0, "flash-attn-3": 240.0}),
            ("d128_b1_h16_q4096", {"fa2tvm": 200.0, "sdpa-cudnn": 190.0, "flash-attn-4": None}),
        ):
            problem = parse(name).problem("forward", "bfloat16")
            for peer, us in times.items():
                row = new_row("forward", name, peer, mode, problem)
                if us is None:
                    row["error"] = "it cannot be imported."
                else:
                    row.update(us_p50=scale * us, us_p20=us, us_p80=2 * us, samples=24)
                    row["tflops"] = problem.flops() / us / scale / 1e6
                if peer.startswith("fa2tvm"):
                    row["schedule"] = {"block_kv": 96 if peer == "fa2tvm" else 128, "stages": 2}
                if mode == "sustained":
                    row.update(power_w=690.0, clock_mhz=1400)
                rows.append({**row, "run": run})
    return rows


def test_report_of_a_gpu_compares_with_the_best_peer(tmp_path: Path) -> None:
    rows = read_rows(write_rows(gpu_rows(), tmp_path / "forward.jsonl")[0])
    text = markdown(rows)
    assert "| bfloat16, forward, burst, d 64 | 1 | 1.200 | 1.200 | 1.200 | 1.100 |" in text
    assert "| bfloat16, forward, burst, d 128 | 1 | 0.950 | 0.950 | 0.950 | – |" in text
    assert "| bfloat16, forward, sustained, all | 2 | 1.068 | 0.950 | 1.200 | 1.100 |" in text
    # 137.4 GFLOP in 200 us: 687 TFLOP/s, 86 % of 800 and 69 % of 1000.
    assert "| d64_b1_h32_q4096 | 687 | 1.200 | 86 | 69 | 625 | 573 | – |" in text
    assert "| 550 | 1.200 | 92 | 55 | 500 | 458 | – | 690 | 1400 |" in text
    assert "flash-attn-4 is absent for d128_b1_h16_q4096: it cannot be imported." in text
    assert "NVIDIA H200 (nvidia_h200), driver 580, CUDA 13.0" in text
    assert "| d64_b1_h32_q4096, forward, burst | 1.100 | block_kv 128 → 96 |" in text
    assert plot(rows, tmp_path / "forward.png").stat().st_size > 0
