"""What ships: every record parses, fits, is of the current kernel, and its evidence resolves."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from python_process import PATIENCE_S

from fa2tvm.device import Device
from fa2tvm.lookup import shipped_root
from fa2tvm.records import Record, problem_from_dict, program_version, read_records
from fa2tvm.tune.database import JOB, TRIALS, Trial, TrialLog
from fa2tvm.tune.job import log_folder

SCHEDULES = shipped_root() / "schedules"
LOGS = shipped_root() / "tuning_logs"
MAX_LOG_BYTES = 5_000_000


def shipped_records() -> list[Record]:
    found: list[Record] = []
    for path in sorted(SCHEDULES.glob("*/*.jsonl")):
        records, complaints = read_records(path)
        assert not complaints, complaints
        found += records
    return found


RECORDS = shipped_records()
FOLDERS = sorted(path.parent for path in LOGS.rglob(TRIALS))


def device_of(folder: Path) -> Device:
    """The device that a job describes."""
    row = json.loads((folder / JOB).read_text())["device"]
    return Device(**{**row, "features": tuple(row["features"])})


def evidence(record: Record) -> Trial:
    """The trial that a record points to."""
    name, _, number = record.log.partition("#")
    (trial,) = [t for t in TrialLog((LOGS / name).parent).load() if t.trial == int(number)]
    return trial


def test_something_ships() -> None:
    assert RECORDS
    assert FOLDERS


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.device['slug']}-{r.problem.name}")
def test_record(record: Record) -> None:
    trial = evidence(record)
    assert trial.decisions == record.decisions
    assert trial.key == record.key
    assert trial.problem == record.problem.name
    assert trial.error is None
    assert record.ratio >= 1.0
    device = device_of((LOGS / record.log).parent)
    assert device.slug == record.device["slug"]
    if record.program != program_version(record.family, record.problem.variant.pass_):
        pytest.skip(
            "the kernel has changed since: lookup passes this record over until it is tuned"
        )
    record.schedule().require_feasible(record.problem.variant, device)


def test_each_place_has_one_record() -> None:
    places = [record.place for record in RECORDS]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_log(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trials = TrialLog(folder).load()
    job = json.loads((folder / JOB).read_text())
    problem = problem_from_dict(job["problem"])
    assert folder == log_folder(LOGS, problem, device_of(folder), job["family"])
    assert {trial.problem for trial in trials} == {problem.name}
    assert [trial.trial for trial in trials] == sorted(trial.trial for trial in trials)
    assert all(run["versions"] and "seed" in run for run in job["runs"])


def test_logs_are_small_enough_for_the_wheel() -> None:
    assert sum(p.stat().st_size for p in LOGS.rglob("*") if p.is_file()) < MAX_LOG_BYTES


def test_tuning_beats_the_default_on_three_problems() -> None:
    """The promise of the tuner on a CPU, from the committed verdicts: at least 64 trials each."""
    cpu = [record for record in RECORDS if record.device["kind"] == "llvm"]
    better = [record for record in cpu if record.ratio >= 1.05]
    assert len(better) >= 3
    for record in better:
        trials = TrialLog((LOGS / record.log).parent).load()
        assert sum(trial.key == record.key for trial in trials) >= 64


_TEXT = """
import sys
from fa2tvm import kernels
from fa2tvm.records import Record
from test_shipped import LOGS, device_of
record = Record.from_line(sys.stdin.read(), "stdin:1")
device = device_of((LOGS / record.log).parent)
print(kernels.build(record.problem.variant, record.schedule(), device).script())
"""


def test_stored_record_builds_the_same_program_in_every_process() -> None:
    """BUGS I13 (TVM #16288): a stored trace did not re-apply after a reload."""
    current = [r for r in RECORDS if r.program == program_version("cpu", r.problem.variant.pass_)]
    if not current:
        pytest.skip("the kernels have changed since: no record applies until they are tuned again")
    line = current[0].to_line()
    texts = {
        subprocess.run(
            [sys.executable, "-c", _TEXT],
            input=line,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
            cwd=Path(__file__).parent,
            env={"PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}"},
        ).stdout
        for _ in range(2)
    }
    assert len(texts) == 1
    assert "def " in texts.pop()
