"""The evidence run on a CPU: its order, its limit of time, what it leaves on disk, no compiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fa2tvm import api, cache
from fa2tvm.bench import evidence
from fa2tvm.bench.evidence import PEERS, Evidence, Phase
from fa2tvm.bench.measure import Policy
from fa2tvm.bench.rows import read_rows
from fa2tvm.cli import app
from fa2tvm.device import nvidia_h200
from fa2tvm.errors import CompileFailed
from fa2tvm.modules import without_compiling
from fa2tvm.workloads import named

TINY = tuple((named(name), "float32", ("forward",)) for name in ("d64_b1_h2_q64", "d64_b1_h1_q80"))
SOON = Policy(0.001)


def kept_rows(out: Path, what: str) -> list[tuple[str, str]]:
    return [(row["workload"], row["peer"]) for row in read_rows(out / f"{what}.jsonl")]


def test_the_plan_has_every_cell_of_the_issue() -> None:
    """36 cells of the speed table beside all peers; six at 16384 and grouped heads back to back."""
    table, long, late = evidence.phases()
    assert len(table.cells) == len(late.cells) == 36
    assert len(long.cells) == 7
    assert {cell[0].head_dim_qk for cell in table.cells} == {64, 128, 256}
    assert {(c[0].head_dim_qk, c[0].causal) for c in long.cells} == {
        (d, causal) for d in (64, 128, 256) for causal in (False, True)
    }
    assert table.repeats
    assert not late.repeats
    assert set(PEERS) | set(late.peers) >= {"flash-attn-2", "flash-attn-3", "flash-attn-4"}
    wanted = evidence.programs([table, long, late], nvidia_h200())
    assert len({variant for variant, _ in wanted}) == 6
    assert len(set(wanted)) == len(wanted) >= 6


def test_the_backward_has_steps_of_training_and_its_forward() -> None:
    table, long, late = evidence.phases("backward")
    assert [phase.what for phase in (table, long, late)] == [
        "gpu_backward", "sustained_backward", "gpu_backward"
    ]  # fmt: skip
    assert {passes for _, _, passes in table.cells} == {("backward", "both")}
    assert {passes for _, _, passes in long.cells} == {("backward",)}
    assert len(table.cells) == len(late.cells) == 36
    assert len(long.cells) == 7
    wanted = {variant for variant, _ in evidence.programs([table, long, late], nvidia_h200())}
    assert len({v for v in wanted if v.pass_ == "backward"}) == 6
    assert len({v for v in wanted if v.pass_ == "forward"}) == 6


def test_all_is_measured_once_before_anything_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell is on disk when the next begins; repeats go on until the time is up."""
    asked: list[tuple[str, int]] = []
    on_disk: list[int] = []
    real = evidence.measure

    def measure(workload: Any, *arguments: Any) -> Any:
        files = tmp_path.glob("*.jsonl")
        on_disk.append(sum(len(path.read_text().splitlines()) for path in files))
        asked.append((workload.name, arguments[5]))
        if len(asked) == 7:
            now["s"] = 1e9
        return real(workload, *arguments)

    now = {"s": 0.0}
    monkeypatch.setattr(evidence, "measure", measure)
    monkeypatch.setattr(evidence.time, "monotonic", lambda: now["s"])
    monkeypatch.setattr(Evidence, "_calls", lambda _: asked.append(("calls", 0)))
    monkeypatch.setattr(Evidence, "_checks", lambda _: None)
    peers = ("fa2tvm", "sdpa-flash")
    for workload, dtype, _ in TINY:
        api.module_for(workload.problem("forward", dtype))
    plan = [
        Phase("a", TINY, peers, SOON, repeats=True),
        Phase("b", TINY[:1], ("sdpa-math",), SOON),
    ]
    run = Evidence(plan, {"commit": "x"}, 100.0, tmp_path, kind="cpu")
    run.measure()
    first, second = (workload.name for workload, _, _ in TINY)
    assert asked[:4] == [("calls", 0), (first, 0), (second, 0), (first, 0)]
    assert asked[4:] == [(first, 1), (second, 2), (first, 3)]
    assert on_disk == [0, 2, 4, 5, 5, 5]
    assert kept_rows(tmp_path, "a") == [(w, p) for w in (first, second) for p in peers]
    counts = {row["workload"]: row["samples"] for row in read_rows(tmp_path / "a.jsonl")}
    assert min(counts.values()) >= 10, "the samples of both passes are in the row"
    assert run.left_out == []


def test_what_no_time_is_left_for_is_named(tmp_path: Path) -> None:
    run = Evidence([Phase("a", TINY, ("sdpa-flash",), SOON)], {}, 0.0, tmp_path, kind="cpu")
    run.measure()
    assert run.left_out == ["calls", "a d64_b1_h2_q64", "a d64_b1_h1_q80", "checks"]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is missing is a row that says so."""
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("fa2tvm.modules._loaded", {})
    api.forget()
    monkeypatch.setattr(Evidence, "_calls", lambda _: None)
    plan = [Phase("a", TINY[:1], ("fa2tvm", "sdpa-flash"), SOON)]
    run = Evidence(plan, {}, 60.0, tmp_path, kind="cpu")
    run.measure()
    ours, theirs = read_rows(tmp_path / "a.jsonl")
    assert "is not compiled yet" in ours["error"]
    assert theirs["error"] is None
    (check,) = json.loads((tmp_path / "checks.json").read_text())
    assert check["error"] == "it is not compiled"
    assert not any(cache.root().iterdir())
    with without_compiling(), pytest.raises(CompileFailed, match="build it before"):
        api.module_for(TINY[0][0].problem("forward", "float32"))


def test_our_modules_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evidence, "_calls", lambda _: None)
    for workload, dtype, _ in TINY:
        api.module_for(workload.problem("forward", dtype))
    Evidence([Phase("a", TINY[:1], ("fa2tvm",), SOON)], {}, 60.0, tmp_path, kind="cpu").measure()
    (check,) = json.loads((tmp_path / "checks.json").read_text())
    assert check["error"] is None
    assert check["variant"]["head_dim_qk"] == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "native"), "evidence is of a GPU"),
        (("--device", "nvidia_h200"), "only the GPU here can be measured"),
        (("--seconds", "-1"), "seconds is -1"),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["evidence", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
