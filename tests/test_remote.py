"""BUGS I11 (TVM #15151, #6922, #10240): candidates on a device elsewhere, through TVM's RPC.

Tracker and servers are processes of this machine. Whatever ends when: a failed trial with its
reason, another server, or one sentence; nobody waits for ever.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import tvm.rpc
from python_process import ROOT
from test_candidates import PROBLEM
from toy_family import ToyForward
from typer.testing import CliRunner

from fa2tvm.cli import app
from fa2tvm.cli.options import place_of
from fa2tvm.compile import build
from fa2tvm.device import detect
from fa2tvm.errors import ServerUnavailable, UnsupportedProblem
from fa2tvm.tune import remote
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.job import tune
from fa2tvm.tune.nouns import Failure, Measured, Options, Progress
from fa2tvm.tune.provenance import machine
from fa2tvm.tune.tracker import Server, request
from fa2tvm.tune.worker import WorkerSpec

pytest.importorskip("tornado", reason="TVM's tracker needs tornado, which is not installed")

DEVICE = detect()
CLI = "from fa2tvm.cli import app; app()"
HERE = "127.0.0.1"
# What a loaded machine may need to start a process that imports TVM, or torch.
PATIENCE_S = 240.0


def free_port() -> int:
    with socket.create_server((HERE, 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def process(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process in a session of its own, all of which ends with the block."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    with log.open("wb") as stream:
        started = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        if started.poll() is None:
            for member in family(started):
                member.kill()
        started.wait()


def family(started: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and all below it."""
    process = psutil.Process(started.pid)
    return [process, *process.children(recursive=True)]


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a tracker."""
    port, log = free_port(), tmp_path_factory.mktemp("tracker") / "log"
    ports = ("--port", str(port), "--port-end", str(port + 1))
    with process("-m", "tvm.exec.rpc_tracker", "--host", HERE, *ports, log=log) as started:
        wait_until(lambda: _listens(port), started, log)
        yield f"{HERE}:{port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HERE, port)) == 0


def wait_until(
    is_so: Callable[[], bool], started: subprocess.Popen[bytes], log: Path | None = None
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert started.poll() is None, log and log.read_text()
        assert time.monotonic() < deadline, log and log.read_text()
        time.sleep(0.05)


def keys(tracker: str) -> list[str]:
    """The keys of the servers that a tracker has."""
    host, _, port = tracker.rpartition(":")
    found = tvm.rpc.connect_tracker(host, int(port)).summary()["server_info"]
    return [row["key"].removeprefix("server:") for row in found]


@contextmanager
def serving(tracker: str, key: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server of a key, registered at the tracker."""
    log, before = folder / f"serve-{time.monotonic_ns()}.log", keys(tracker).count(key)
    arguments = ("-c", CLI, "serve", "--tracker", tracker, "--key", key)
    with process(*arguments, log=log) as started:
        wait_until(lambda: keys(tracker).count(key) > before, started, log)
        yield started


def sessions(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Processes of a server's sessions."""
    return psutil.Process(server.pid).children()


@pytest.fixture(scope="module")
def server(
    tracker: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """One that outlives what the tests do to its sessions; its key is "here"."""
    with serving(tracker, "here", tmp_path_factory.mktemp("server")) as started:
        yield started


def options(tracker: str, key: str, timeout_s: float = PATIENCE_S, **changes: Any) -> Options:
    return Options(
        **{"run_timeout_s": 30.0, "rounds": 1, "builders": 1, "plugins": ("toy_family",)} | changes,
        server=Server(tracker, key, timeout_s),
    )


def offer(monkeypatch: pytest.MonkeyPatch, **choices: tuple[Any, ...]) -> None:
    offered = {"block_kv": (1,), "order": ("ij",), "fault": ("none",)} | choices
    monkeypatch.setattr(ToyForward, "offered", offered)


def trials_in(folder: Path) -> list[tuple[Any, str | None]]:
    """What was tried (its fault, of the toy), and how it failed."""
    (path,) = folder.rglob("trials.jsonl")
    return [(trial.decisions.get("fault"), trial.error) for trial in TrialLog(path.parent).load()]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`fa2tvm` with arguments."""
    return subprocess.run(
        [sys.executable, "-c", CLI, *arguments],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_job_on_a_server(
    tracker: str,
    server: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A right candidate is timed there, faulty ones are told apart, and nothing is left of it."""
    errors = {"none": None, "wrong": "wrong", "crash": "crash", "unbuildable": "build"}
    offer(monkeypatch, fault=tuple(errors))
    given = options(tracker, "here")
    result = tune(PROBLEM, DEVICE, family="toy", trials=8, out=tmp_path, options=given)
    assert result.best_schedule().fault == "none"
    found = trials_in(tmp_path)
    assert len(found) == 4
    assert dict(found) == errors
    wait_until(lambda: not sessions(server), server)


@pytest.mark.usefixtures("server")
def test_the_command(tracker: str, tmp_path: Path) -> None:
    """`tune` takes the server's device and machine; one of another device is refused."""
    sizes = ("--seq-q", "64", "--head-dim", "8", "--heads", "2", "--pass", "forward")
    place = ("--tracker", tracker, "--key", "here", "--out", os.fspath(tmp_path))
    done = command("tune", *sizes, "--trials", "2", *place)
    assert done.returncode == 0, done.stderr
    assert [error for _, error in trials_in(tmp_path / DEVICE.slug)] == [None, None]
    (job,) = tmp_path.rglob("job.json")
    assert json.loads(job.read_text())["runs"][0]["machine"] == machine()
    with pytest.raises(UnsupportedProblem, match=f"the server of key 'here' is {DEVICE.slug}"):
        place_of("nvidia_h200", tracker, "here", PATIENCE_S)


class Killer:
    """Ends something once the second trial is being checked."""

    def __init__(self, kill: Callable[[], object]) -> None:
        self._kill = kill
        self._started = False

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "checking" and progress.trials == 1 and not self._started:
            self._started = True
            threading.Timer(1.0, self._kill).start()


def tune_with_a_hang(tmp_path: Path, given: Options, kill: Callable[[], object]) -> None:
    """The second trial hangs, and something is killed meanwhile."""
    where = {"family": "toy", "out": tmp_path, "options": given, "progress": Killer(kill)}
    tune(PROBLEM, DEVICE, trials=3, seed=1, **where)


@pytest.fixture
def hang_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial 0 is the default, trial 1 hangs, trial 2 is right."""
    offer(monkeypatch, block_kv=(1, 2), fault=("none", "hang"))
    hand_picked = [ToyForward(fault="hang"), ToyForward(block_kv=2)]
    monkeypatch.setattr(ToyForward, "hand_picked", classmethod(lambda *_: hand_picked))


@pytest.mark.usefixtures("hang_first")
def test_servers_that_are_killed_in_trial_2(tracker: str, tmp_path: Path) -> None:
    """Another one takes over; without one the trial is written down, and the job says why."""
    with serving(tracker, "dies", tmp_path) as first, serving(tracker, "dies", tmp_path) as second:
        children: list[psutil.Process] = []

        def kill_both() -> None:
            """The one in use, then the other once it has taken over."""
            order = (first, second) if sessions(first) else (second, first)
            for victim in order:
                wait_until(lambda now=victim: len(family(now)) == 3, victim)  # type: ignore[misc]
                children.extend(family(victim)[1:])
                victim.kill()
                victim.wait()

        given = options(tracker, "dies", timeout_s=2.0, run_timeout_s=PATIENCE_S)
        with pytest.raises(ServerUnavailable, match=r"no server of it.*fa2tvm serve"):
            tune_with_a_hang(tmp_path, given, kill_both)
        assert trials_in(tmp_path) == [("none", None), ("hang", "lost")]
        (path,) = tmp_path.rglob("trials.jsonl")
        assert "server was lost" in str(TrialLog(path.parent).load()[1].reason)
        # Sessions and workers have ended with their servers.
        assert len(children) == 4
        assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []


@pytest.fixture
def runner(tracker: str, tmp_path: Path) -> Iterator[remote.RemoteRunner]:
    """One whose server is "here"; no time of its own is short."""
    spec = WorkerSpec("fa2tvm.tune.harness", tmp_path, ("toy_family",))
    runner = remote.RemoteRunner(spec, Server(tracker, "here", PATIENCE_S), DEVICE, PATIENCE_S)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right candidate, built where no other test finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA2TVM_HOME", os.fspath(tmp_path_factory.mktemp("home")))
        return build(PROBLEM.variant, ToyForward(), DEVICE)


def test_a_server_outlives_its_sessions(
    server: subprocess.Popen[bytes], runner: remote.RemoteRunner, module: Path
) -> None:
    """A session's process is killed, by the kernel's out-of-memory killer say: the next is served.

    TVM's own server ends its thread then, and waits with a closed door.
    """
    assert runner.check(module, 0) is None
    (session,) = sessions(server)
    session.kill()
    assert runner.check(module, 0) is None
    (session,) = sessions(server)
    session.kill()
    first, second = runner.time(PROBLEM, [module, module], 1)
    assert isinstance(first, Measured)
    assert isinstance(second, Measured)


def test_a_server_that_does_not_move_is_lost(
    server: subprocess.Popen[bytes], runner: remote.RemoteRunner, module: Path
) -> None:
    """A machine that is gone, or stopped, sends nothing, not even that it has ended."""
    assert runner.check(module, 0) is None
    runner._timeout_s = runner._connect_s = 2.0
    stopped = family(server)
    for member in stopped:
        member.suspend()
    try:
        lost = runner.check(module, 0)
        (unserved,) = runner.time(PROBLEM, [module], 1)
    finally:
        for member in stopped:
            member.resume()
    assert lost == Failure("lost", "the session with the server ended: no answer within 2 s")
    assert isinstance(unserved, Failure)
    assert unserved.kind == "unserved"


@pytest.mark.usefixtures("server")
def test_no_server_to_be_had(tracker: str) -> None:
    """One sentence, with the remedy: no such key, no tracker, none of TVM's, a busy server."""
    with pytest.raises(ServerUnavailable, match=r"key is 'nobody', but .*\(it has: here\)"):
        request(Server(tracker, "nobody", 0.5))
    with pytest.raises(ServerUnavailable, match=r"no tracker answers .*refused.*rpc_tracker"):
        request(Server(f"{HERE}:{free_port()}", "key", 0.5))
    with socket.create_server((HERE, 0)) as silent:
        other = f"{HERE}:{silent.getsockname()[1]}"
        with pytest.raises(ServerUnavailable, match="is no tracker of TVM"):
            request(Server(other, "key", 0.5))
    session = request(Server(tracker, "here", PATIENCE_S))
    with pytest.raises(ServerUnavailable, match=r"of key 'here' was free within 0\.5 s"):
        request(Server(tracker, "here", 0.5))
    del session
    request(Server(tracker, "here", PATIENCE_S))


def test_no_server_at_the_start_of_a_command(tracker: str, tmp_path: Path) -> None:
    sizes = ("--seq-q", "64", "--out", os.fspath(tmp_path), "--server-timeout", "0.5")
    done = command("tune", *sizes, "--tracker", tracker, "--key", "nobody")
    assert done.returncode == 2
    assert done.stderr.startswith("fa2tvm: key is 'nobody', but")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_server_of_tvm_itself(tracker: str, tmp_path: Path) -> None:
    """It lacks what a job calls."""
    log, port = tmp_path / "plain.log", free_port()
    ports = ("--host", HERE, "--port", str(port), "--port-end", str(port + 1))
    own = ("-m", "tvm.exec.rpc_server", "--tracker", tracker, "--key", "plain", *ports)
    with process(*own, log=log) as started:
        wait_until(lambda: "plain" in keys(tracker), started, log)
        with pytest.raises(ServerUnavailable, match=r"fa2tvm\.tune\.open.*fa2tvm serve"):
            remote.about(Server(tracker, "plain", PATIENCE_S))


def test_a_server_needs_a_tracker() -> None:
    place = ("--tracker", f"{HERE}:{free_port()}", "--key", "k")
    done = command("serve", *place)
    assert done.returncode == 2
    assert done.stderr.startswith("fa2tvm: no tracker answers at")
    with socket.create_server((HERE, 0)) as taken:
        done = command("serve", *place, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot be listened on" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tracker", "127.0.0.1:9190"), "--key is not; give both or neither"),
        (("--key", "k"), "--tracker is not; give both or neither"),
        (("--tracker", "nowhere", "--key", "k"), "must be HOST:PORT"),
        (("--tracker", "h:0", "--key", "k"), "must be HOST:PORT"),
        (("--tracker", "h:1", "--key", "two words"), "must be one word"),
        (("--tracker", "h:1", "--key", "k", "--server-timeout", "nan"), "must be a number"),
    ],
)
def test_contradictory_options(arguments: Sequence[str], message: str) -> None:
    done = CliRunner().invoke(app, ["tune", "--seq-q", "64", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


# What a lost server does to the times of a batch.


class Losing(remote.RemoteRunner):
    """Times by a list of answers; a string is a failure."""

    def __init__(self, answers: Sequence[float | str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def _call(self, what: str, path: Path, **options: Any) -> Any:
        self.asked.append(path.name)
        answer = self.answers.pop(0)
        return Failure(answer, answer) if isinstance(answer, str) else {"us": answer}


@pytest.mark.parametrize(
    ("answers", "outcomes"),
    [
        # Warm-up of default, a and b, then a round of each.
        ([1, 1, 1, 5, 6, 7], [5, 6, 7]),
        # Lost in a's turn: default and b anew.
        ([1, 1, 1, 5, "lost", 7, 1, 1, 15, 17], [15, "lost", 17]),
        # The default is not blamed, nor is a crash forgotten.
        ([1, "crash", 1, "lost", 7, 1, 1, 15, 17], [15, "crash", 17]),
        # No other server: what was not measured whole is no trial.
        ([1, 1, 1, 5, "lost", "unserved"], ["unserved", "lost", "unserved"]),
        # Every server is lost.
        ([1, "lost", 1, 5, 7, 1, "lost", 5, "lost"], ["lost", "lost", "lost"]),
    ],
)
def test_times_are_of_one_server(
    answers: Sequence[float | str], outcomes: Sequence[float | str]
) -> None:
    runner = Losing(answers)
    found = runner.time(PROBLEM, [Path("default"), Path("a"), Path("b")], 1)
    assert [x.us if isinstance(x, Measured) else x.kind for x in found] == outcomes
    assert not runner.answers
