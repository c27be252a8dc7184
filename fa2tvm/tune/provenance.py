"""What a job says about itself: when, where and with what it was run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from fa2tvm.device import cpu_model
from fa2tvm.records import problem_to_dict, program_version, versions, write_atomically
from fa2tvm.tune.database import JOB
from fa2tvm.tune.space import Space
from fa2tvm.tune.tracker import Server


def utc_now() -> str:
    """Day and time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_job(
    folder: Path,
    space: Space,
    seed: int,
    trials: int | None,
    seconds: float | None,
    server: Server | None = None,
) -> None:
    """Describe the job in job.json; each run of it adds an entry."""
    path = folder / JOB
    before = _read_job(path)
    runs = before["runs"]
    runs.append(
        {
            "date": utc_now(),
            "trials": trials,
            "seconds": seconds,
            "seed": seed,
            "program": program_version(space.family, space.problem.variant.pass_),
            "versions": versions(),
            "commit": git_commit(),
            "machine": server.machine if server else machine(),
        }
    )
    row = before | {
        "problem": problem_to_dict(space.problem),
        "family": space.family,
        "device": space.device.to_dict(),
        "runs": runs,
    }
    write_atomically(path, json.dumps(row, indent=1) + "\n")


def add_verdict(folder: Path, winner: int, contenders: list[dict[str, Any]]) -> None:
    """Put the evidence of a promotion into job.json: the trial that won, and every contender."""
    path = folder / JOB
    row = _read_job(path)
    row["verdicts"].append({"date": utc_now(), "winner": winner, "contenders": contenders})
    write_atomically(path, json.dumps(row, indent=1) + "\n")


def _read_job(path: Path) -> dict[str, Any]:
    """What job.json says, with lists of runs and verdicts; one that is damaged is kept aside."""
    empty: dict[str, Any] = {"runs": [], "verdicts": []}
    if not path.exists():
        return empty
    try:
        row: dict[str, Any] = empty | json.loads(path.read_text())
        if isinstance(row["runs"], list) and isinstance(row["verdicts"], list):
            return row
    except (ValueError, TypeError, RecursionError):
        pass
    path.replace(path.with_suffix(".json.unreadable"))
    return empty


def git_commit() -> str | None:
    """Commit of the checkout that this package runs from, with "+dirty"; None outside of one.

    A snapshot of a checkout (`git archive`) may say its commit in a file COMMIT at its root.
    """
    root = Path(__file__).resolve().parents[2]
    recorded = root / "COMMIT"
    if recorded.exists():
        return recorded.read_text().strip()
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no", "fa2tvm")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+dirty" if dirty else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=10
    ).stdout.strip()


def machine() -> dict[str, Any]:
    """What was measured on, without its name."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
