"""Tuned records: round trip, refusal of damaged lines, keys (BUGS I07, I13)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fa2tvm import records
from fa2tvm.device import baseline
from fa2tvm.errors import CorruptRecord
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.records import Record, merge_records, program_version, read_records, tuning_key
from fa2tvm.schedule import CpuForward

DEVICE = baseline("x86-64-v3")


def a_problem(seq: int = 1024, **variant: object) -> Problem:
    fields = {"pass_": "forward", "dtype": "float32", "head_dim_qk": 64, "head_dim_v": 64}
    return Problem(Variant(**{**fields, **variant}), Shape(1, 8, 8, seq, seq))


def a_record(problem: Problem | None = None, us: float = 50.0) -> Record:
    problem = problem or a_problem()
    return Record(
        problem=problem,
        family="cpu",
        decisions=CpuForward.default(problem.variant, DEVICE).to_dict(),
        us=us,
        us_default=100.0,
        device=records.device_summary(DEVICE),
        program=program_version("cpu", "forward"),
        versions=records.versions(),
        date="2026-11-30T00:00:00+00:00",
        log="cpu_x86_64_v3/forward/x/trials.jsonl#3",
    )


def test_round_trip() -> None:
    record = a_record()
    again = Record.from_line(record.to_line(), "here:1")
    assert again == record
    assert again.schedule() == record.schedule()
    assert again.ratio == 2.0


@pytest.mark.parametrize("us", [1e-4, 5e-324, 1e300])
def test_round_trip_of_any_time(us: float) -> None:
    """What is written is read again, even a time that rounds to 0."""
    again = Record.from_line(a_record(us=us).to_line(), "here:1")
    assert again.us == us


@pytest.mark.parametrize(
    "damage",
    [
        {"us": 0},
        {"us": -1.0},
        {"us": float("nan")},
        {"us": float("inf")},
        {"us": "fast"},
        {"us": True},
        {"format": 99},
        {"problem": {}},
        {"device": {"slug": "x"}},
        {"decisions": 3},
        {"versions": [0]},
        {"device": [7]},
        {"problem": [1]},
    ],
)
def test_damaged_fields_are_refused(damage: dict[str, object]) -> None:
    row = json.loads(a_record().to_line()) | damage
    with pytest.raises(CorruptRecord, match=r"some\.jsonl:7"):
        Record.from_line(json.dumps(row), "some.jsonl:7")


@pytest.mark.parametrize("missing", sorted(json.loads(a_record().to_line())))
def test_missing_fields_are_refused(missing: str) -> None:
    row = json.loads(a_record().to_line())
    del row[missing]
    if missing in ("key", "ratio"):  # derived: written for the reader, never read
        Record.from_line(json.dumps(row), "x:1")
        return
    with pytest.raises(CorruptRecord, match=missing):
        Record.from_line(json.dumps(row), "x:1")


def test_one_bad_line_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "forward.jsonl"
    good = a_record().to_line()
    path.write_text(f"{good}\nnot json\n\n{good[:40]}\n{good}\n")
    found, complaints = read_records(path)
    assert len(found) == 2
    assert [f"{path}:2" in complaints[0], f"{path}:4" in complaints[1]] == [True, True]


def test_merge_replaces_its_place_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "d" / "forward.jsonl"
    long, medium = a_problem(8192), a_problem(1024)
    merge_records(path, [a_record(medium), a_record(long)])
    merge_records(path, [a_record(medium, us=25.0)])
    found, complaints = read_records(path)
    assert not complaints
    assert {(r.problem.name, r.us) for r in found} == {(medium.name, 25.0), (long.name, 50.0)}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_key_tells_everything_apart() -> None:
    """BUGS I07 (tile-ai/tilelang #1250, triton #9822): a key without the size or the versions."""

    def key(problem: Problem, **other: object) -> str:
        fields = {
            "family": "cpu",
            "slug": "a",
            "program": "p",
            "versions": {"apache-tvm": "0.27.0"},
        }
        return tuning_key(problem, **{**fields, **other})

    keys = [
        key(a_problem()),
        key(a_problem(8192)),
        key(a_problem(256)),
        key(a_problem(causal=True)),
        key(a_problem(dtype="float16")),
        key(a_problem(head_dim_qk=32)),
        key(a_problem(head_dim_v=32)),
        key(a_problem(pass_="backward")),
        key(a_problem(), slug="b"),
        key(a_problem(), family="sm80"),
        key(a_problem(), program="q"),
        key(a_problem(), versions={"apache-tvm": "0.28.0"}),
    ]
    assert len(set(keys)) == len(keys)
    assert key(a_problem()) == key(a_problem(1025))


def test_program_version_follows_the_code_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernel.py"
    monkeypatch.setitem(records.PROGRAM_SOURCES, ("other", "forward"), source)

    def version(text: str) -> str:
        source.write_text(text)
        program_version.cache_clear()
        return program_version("other", "forward")

    first = version("def f(x):\n    return x + 1\n")
    assert first == version(
        '"""Doc."""\n\n# why\ndef f(x):\n    """Doc."""\n    return x+1  # so\n'
    )
    assert first == version("def f(\n    x,\n):\n    return x + 1\n")
    assert first != version("def f(x):\n    return x + 2\n")
    assert version("import fa2tvm.kernels.softmax\n") != version("import os.path\n")
    program_version.cache_clear()


def test_records_are_values() -> None:
    record = a_record()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.us = 1.0  # type: ignore[misc]
