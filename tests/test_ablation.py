"""The ablation of FlashAttention-2 against version 1: its points, and what the command refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fa2tvm.bench import ablation
from fa2tvm.bench.plot import plot
from fa2tvm.bench.rows import read_rows
from fa2tvm.cli import app
from fa2tvm.device import nvidia_h200
from fa2tvm.lookup import lookup
from fa2tvm.problem import Problem, Shape, Variant

ROOT = Path(__file__).resolve().parent.parent
# What each point changes, beside the block sizes that split keys need.
CHANGED = {
    "v2": set(),
    "v2 without trusted maxima": {"trust_maximum", "lazy_rescale"},
    "split-K": {"split_keys"},
    "rescaling in each step": {"rescale_each_step"},
    "no sequence parallelism": {"parallel_queries"},
    "m and l saved": {"save_m_and_l"},
    "v1": {
        "split_keys",
        "rescale_each_step",
        "parallel_queries",
        "save_m_and_l",
        "trust_maximum",
        "lazy_rescale",
    },
}
SIZES = {
    "block_q",
    "block_kv",
    "warps",
    "stages",
    "blocks_per_multiprocessor",
    "q_in_registers",
}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("point", ablation.POINTS)
def test_points_change_what_they_say(point: str, d: int) -> None:
    device = nvidia_h200()
    problem = Problem(Variant("forward", "bfloat16", d, d), Shape(1, 16, 16, 16384, 16384))
    schedule = ablation.schedule_of(point, problem, device)
    assert schedule.reasons(problem.variant, device) == []
    v2 = lookup(problem, device, family="sm80").schedule.to_dict()
    changed = {name for name, value in schedule.to_dict().items() if value != v2[name]}
    assert changed - SIZES == CHANGED[point]
    if "split_keys" not in changed:
        assert changed.isdisjoint(SIZES)


def test_each_point_of_each_length_is_built_once() -> None:
    programs = ablation.programs(nvidia_h200())
    assert len(programs) == len(set(programs))
    assert {variant.head_dim_qk for variant, _ in programs} == {64, 128}
    assert len(programs) >= 2 * len(ablation.POINTS)


def test_cells_are_dense_and_of_the_three_lengths() -> None:
    cells = ablation.cells()
    shapes = {(w.head_dim_qk, w.shape.batch, w.shape.seq_q) for w, _, _ in cells}
    assert shapes == {(d, 16384 // n, n) for d in (64, 128) for n in (512, 8192, 16384)}
    assert not any(w.causal for w, _, _ in cells)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ablation", "v1-v2"], "--device cuda"),
        (["--ablation", "v3-v2"], "only v1-v2 exist"),
        (["--ablation", "v1-v2", "--calls"], "more than one"),
    ],
    ids=str,
)
def test_refused_in_one_sentence(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code != 0
    assert word in result.output + str(result.exception)


def test_picture_of_the_committed_rows(tmp_path: Path) -> None:
    rows = read_rows(ROOT / "benchmarks" / "nvidia_h200" / "ablation_v1_v2.jsonl")
    assert {row["peer"] for row in rows} == set(ablation.COMPARED)
    assert all(row["error"] is None for row in rows)
    assert plot(rows, tmp_path / "ablation.png").stat().st_size > 10_000
