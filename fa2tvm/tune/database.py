"""The log of a tuning job: one trial a line, on disk as soon as it is finished."""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fa2tvm.errors import CorruptRecord, JobBusy

TRIALS = "trials.jsonl"
JOB = "job.json"


@dataclass(frozen=True)
class Trial:
    """One candidate that was tried, measured or not.

    Attributes
    ----------
    trial
        Its number in the log, from 0.
    key, problem
        What it belongs to: `records.tuning_key` and the problem's name.
    decisions
        The schedule.
    us, us_default
        Median microseconds of the candidate, and of the default schedule in the same rounds;
        None where it failed.
    runs_us
        The single measurements.
    error, reason
        Kind of failure ("build", "wrong", "crash", "hang", "memory", "timing") and one sentence;
        None where it was measured.
    date
        UTC, ISO 8601.
    """

    trial: int
    key: str
    problem: str
    decisions: dict[str, Any]
    us: float | None
    us_default: float | None
    runs_us: tuple[float, ...]
    error: str | None
    reason: str | None
    date: str

    @property
    def relative(self) -> float:
        """Its time over the default's, in the same rounds; below 1 is faster.

        Raises
        ------
        ValueError
            Where it failed.
        """
        if self.us is None or self.us_default is None:
            raise ValueError(f"trial {self.trial} has no time ({self.reason})")
        return self.us / self.us_default

    def to_line(self) -> str:
        """The trial as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, text: str, where: str) -> Trial:
        """Parse one line; `where` (file and line) stands in the error.

        Raises
        ------
        CorruptRecord
            For anything but a complete trial.
        """
        try:
            row = json.loads(text)
            if set(row) != {field.name for field in fields(cls)}:
                raise ValueError("its fields are not those of a trial")
            if (row["us"] is None) == (row["error"] is None):
                raise ValueError("it must have either a time or an error")
            if (row["us"] is None) != (row["us_default"] is None):
                raise ValueError("it must have the default's time beside its own")
            return cls(**{**row, "runs_us": tuple(row["runs_us"])})
        except (ValueError, TypeError) as error:
            raise CorruptRecord(f"{where} is no trial ({error}); it is skipped.") from error


class TrialLog:
    """The trials of one folder; several processes may append to it at once.

    Every append holds an exclusive lock on the file, takes the next number after what any process
    has written, and is on disk when it returns.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / TRIALS
        folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> list[Trial]:
        """Every readable trial, oldest first.

        A line that is none is skipped with a warning that names file and line.
        """
        return list(_readable(self.path)) if self.path.exists() else []

    def append(self, **values: Any) -> Trial:
        """Number a trial, write it and wait until it is on disk.

        Parameters
        ----------
        values
            Every field of Trial but its number.
        """
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            text = _read_all(handle)
            if text and not text.endswith(b"\n"):
                text = self._set_aside(handle, text)
            trial = Trial(trial=_next_number(text), **values)
            os.write(handle, trial.to_line().encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        return trial

    def _set_aside(self, handle: int, text: bytes) -> bytes:
        """Move a half-written last line (its writer was killed) into a file of its own."""
        whole, _, half = text.rpartition(b"\n")
        whole += b"\n" if whole else b""
        number = whole.count(b"\n") + 1
        aside = self.path.with_name(f"{TRIALS}.line{number}.partial")
        aside.write_bytes(half)
        os.ftruncate(handle, len(whole))
        warnings.warn(
            f"{self.path}:{number} was half written; it is kept in {aside.name}.",
            RuntimeWarning,
            stacklevel=3,
        )
        return whole


@contextmanager
def job_lock(folder: Path) -> Iterator[None]:
    """Hold a folder for one tuning job; the lock ends with the process, however it ends.

    Raises
    ------
    JobBusy
        Where another process holds it: two jobs would disturb each other's timing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobBusy(
                f"folder {folder} is in use by another tuning job; wait for it or choose another."
            ) from None
        yield
    finally:
        os.close(handle)


def _readable(path: Path) -> Iterator[Trial]:
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            yield Trial.from_line(line, f"{path}:{number}")
        except CorruptRecord as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)


def _read_all(handle: int) -> bytes:
    os.lseek(handle, 0, os.SEEK_SET)
    parts = []
    while part := os.read(handle, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _next_number(text: bytes) -> int:
    """One more than the highest number of any readable line."""
    highest = -1
    for line in text.splitlines():
        try:
            highest = max(highest, int(json.loads(line)["trial"]))
        except (ValueError, KeyError, TypeError):
            continue
    return highest + 1
