"""Issue 7: a tuning job that is killed loses no finished trial and leaves no process behind.

`python tests/crash_tuning.py --kills 100` is the long form.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import crash_tuning
import pytest
from python_process import ROOT

from fa2tvm.tune.database import TrialLog


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_few_kills(tmp_path: Path) -> None:
    """BUGS I10 (TVM #11096): kill -9, on a real problem."""
    script = Path(__file__).with_name("crash_tuning.py")
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "2", "--folder", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] == 2
    assert seen["lost"] == seen["orphans"] == seen["unclean"] == 0


def test_a_job_that_ends_by_itself_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it comes to its end, fails, or is ended by somebody else."""
    monkeypatch.setattr(crash_tuning, "_wait", lambda said, _: (len(said.read()), False))

    def fail(*_: object) -> str:
        raise OSError("no room")

    def die(*_: object) -> str:
        os.kill(os.getpid(), signal.SIGSEGV)
        return ""

    endings = [(lambda *_: "all is tried", "exit code 1: all is tried"), (fail, "OSError: no room")]
    for ending, reason in [*endings, (die, "exit code -11: it said nothing")]:
        (tmp_path / "store0" / crash_tuning.ENDED).unlink(missing_ok=True)
        monkeypatch.setattr(crash_tuning, "_tune", ending)
        outcome = crash_tuning.crash(1, tmp_path, seed=1)
        assert outcome.kills == 0
        assert reason in str(outcome.ended)


def _end_by_signal(job: int, terminal: int) -> None:
    os.kill(job, signal.SIGTERM)
    while _read(terminal):
        pass


def _close_the_terminal(job: int, terminal: int) -> None:
    del job
    os.close(terminal)


def _read(terminal: int) -> bool:
    """Take what a process says, as a terminal holds a few KiB only; False once it has ended."""
    try:
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", [_end_by_signal, _close_the_terminal])
def test_a_command_is_ended_tidily(end: Callable[[int, int], None], tmp_path: Path) -> None:
    """A night's job on a shared machine: somebody ends it, or the terminal is closed."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    sizes = ["--seq-q", "256", "--head-dim", "8", "--heads", "2", "--pass", "forward"]
    code = "from fa2tvm.cli import app; app()"
    command = [sys.executable, "-c", code, "tune", *sizes, "--out", os.fspath(tmp_path / "logs")]
    job, terminal = pty.fork()
    if job == 0:
        os.environ.update(PYTHONPATH=os.fspath(ROOT), TMPDIR=os.fspath(scratch))
        os.execv(sys.executable, command)
    deadline = time.monotonic() + 240
    while not (seen := _lines(tmp_path)) and time.monotonic() < deadline and _read(terminal):
        pass
    end(job, terminal)
    os.waitpid(job, 0)
    assert seen
    assert crash_tuning.living(scratch) == []
    assert list(scratch.glob("fa2tvm-*")) == []
    (path,) = tmp_path.rglob("trials.jsonl")
    assert len(TrialLog(path.parent).load()) >= seen


def _lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("trials.jsonl"))
