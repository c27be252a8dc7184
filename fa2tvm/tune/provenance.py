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


def utc_now() -> str:
    """Day and time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_job(
    folder: Path, space: Space, seed: int, trials: int | None, seconds: float | None
) -> None:
    """Describe the job in job.json; each run of it adds an entry."""
    path = folder / JOB
    runs: list[Any] = []
    if path.exists():
        try:
            runs = json.loads(path.read_text())["runs"]
        except (ValueError, KeyError, TypeError):
            path.replace(path.with_suffix(".json.unreadable"))
    runs.append(
        {
            "date": utc_now(),
            "trials": trials,
            "seconds": seconds,
            "seed": seed,
            "program": program_version(space.family, space.problem.variant.pass_),
            "versions": versions(),
            "commit": git_commit(),
            "machine": machine(),
        }
    )
    row = {
        "problem": problem_to_dict(space.problem),
        "family": space.family,
        "device": space.device.to_dict(),
        "runs": runs,
    }
    write_atomically(path, json.dumps(row, indent=1) + "\n")


def git_commit() -> str | None:
    """Commit of the checkout that this package runs from, with "+dirty"; None outside of one."""
    root = Path(__file__).resolve().parents[2]
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
