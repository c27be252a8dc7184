"""The demo from end to end, with little time for tuning."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fa2tvm.bench.rows import read_rows
from fa2tvm.cli import app
from fa2tvm.pack import load_pack


def test_demo(tmp_path: Path) -> None:
    """The half that must not import the compiler runs in a process of its own, and says so."""
    result = CliRunner().invoke(app, ["demo", "--seconds", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "rows.jsonl")
    ours = [row for row in rows if row["peer"] == "fa2tvm"]
    assert [row["pass"] for row in ours] == ["forward", "backward"]
    assert all(row["error"] is None for row in ours)
    assert {module.variant.pass_ for module in load_pack(tmp_path / "pack")} == {
        "forward",
        "backward",
    }
    for name in ("rows.csv", "comparison.png"):
        assert (tmp_path / name).stat().st_size > 0
    assert "times as fast as the default" in result.output.replace("\n", " ")
