"""What tuning writes down: nothing is lost, damage loses only itself, failures are one sentence.

The rows named are of BUGS.md, section I.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_records import a_problem, a_record

from fa2tvm import files
from fa2tvm.errors import CorruptRecord, JobBusy, StoreUnavailable
from fa2tvm.records import merge_records, read_records, write_atomically
from fa2tvm.tune.database import Trial, TrialLog, job_lock
from fa2tvm.tune.provenance import add_verdict


def a_trial(number: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "key": "k",
        "problem": f"p{number}",
        "decisions": {"block_kv": number},
        "us": 1.5,
        "us_default": 2.0,
        "runs_us": (1.0, 1.5, 2.0),
        "error": None,
        "reason": None,
        "date": "2026-11-30T00:00:00+00:00",
    }
    return fields | changes


@pytest.fixture
def log(tmp_path: Path) -> TrialLog:
    """A log of three trials."""
    made = TrialLog(tmp_path)
    for n in range(3):
        made.append(**a_trial(n))
    return made


def loads_cleanly(log: TrialLog) -> list[str]:
    """The problems of a log that is read without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [trial.problem for trial in log.load()]


def test_log_round_trip(tmp_path: Path) -> None:
    log = TrialLog(tmp_path)
    written = [log.append(**a_trial(n, predicted=n or None)) for n in range(3)]
    written.append(log.append(**a_trial(3, us=None, us_default=None, runs_us=(), error="crash")))
    assert [t.trial for t in written] == [0, 1, 2, 3]
    assert TrialLog(tmp_path).load() == written


GOOD = b'{"trial": 3, "key": "k", "problem": "x", "decisions": {}, "us": null, "us_default": null, '
GOOD += b'"runs_us": [], "error": "crash", "reason": "r", "date": "d"}'
# What may stand where the second of three lines stood.
DAMAGE: dict[str, bytes] = {
    "cut": b'{"trial": 1, "ke',
    "foreign": b'{"workload": 7}',
    "no JSON": b"Segmentation fault (core dumped)",
    "no UTF-8": GOOD.replace(b'"x"', b'"\xff"'),
    "zeros": b"\0" * 100,
    "glued": GOOD[:40] + GOOD,
    "two in a line": GOOD + GOOD,
    "deep": b"[" * 100_000,
    "time 0": GOOD.replace(b"[]", b"[0]"),
    "NaN": GOOD.replace(b"[]", b"[NaN]"),
    "infinite": GOOD.replace(b"[]", b"[1e999]"),
    "number too large": GOOD.replace(b"[]", b"[1" + b"0" * 400 + b"]"),
    "number of a wrong type": GOOD.replace(b'"trial": 3', b'"trial": true'),
    "newer": GOOD.replace(b'"date"', b'"mood": 1, "date"'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_line_loses_only_itself(kind: str, log: TrialLog) -> None:
    """The others load, a warning names file and line, the text is kept, the next append mends."""
    lines = log.path.read_bytes().splitlines()
    log.path.write_bytes(b"\n".join([lines[0], DAMAGE[kind], b"", lines[2]]) + b"\n")
    with pytest.warns(RuntimeWarning, match=r"trials\.jsonl:2 is no trial .*it is skipped\.$"):
        assert [t.problem for t in log.load()] == ["p0", "p2"]
    with pytest.warns(RuntimeWarning, match=r"trials\.jsonl:2 is no trial .*damaged\.$"):
        trial = log.append(**a_trial(9))
    assert trial.trial >= 3
    assert loads_cleanly(log) == ["p0", "p2", "p9"]
    assert log.path.with_name("trials.jsonl.damaged").read_bytes() == DAMAGE[kind] + b"\n"
    assert sorted(p.name for p in log.folder.iterdir()) == ["trials.jsonl", "trials.jsonl.damaged"]


def test_a_cut_last_line_is_kept_aside(log: TrialLog) -> None:
    """A writer was killed within a line."""
    with log.path.open("ab") as stream:
        stream.write(DAMAGE["cut"])
    with pytest.warns(RuntimeWarning, match=r"trials\.jsonl:4 is no trial"):
        assert log.append(**a_trial(3)).trial == 3
    assert loads_cleanly(log) == ["p0", "p1", "p2", "p3"]


def test_a_last_line_that_lacks_its_end_only_is_a_trial(log: TrialLog) -> None:
    log.path.write_bytes(log.path.read_bytes().rstrip(b"\n"))
    assert loads_cleanly(log) == ["p0", "p1", "p2"]
    assert log.append(**a_trial(3)).trial == 3
    assert loads_cleanly(log) == ["p0", "p1", "p2", "p3"]


def test_an_empty_log_is_a_log(tmp_path: Path) -> None:
    log = TrialLog(tmp_path)
    log.path.write_bytes(b"")
    assert log.load() == []
    assert log.append(**a_trial(0)).trial == 0


def _write_many(folder: Path, problem: str) -> None:
    log = TrialLog(folder)
    for n in range(20):
        log.append(**a_trial(n, problem=problem))


def _together(*calls: tuple[Callable[..., None], tuple[Any, ...]]) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=call, args=arguments) for call, arguments in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_two_writers_both_land(tmp_path: Path) -> None:
    """I09 (source read): two processes, 20 records each; all 40 stand under their own workload."""
    _together(*((_write_many, (tmp_path, name)) for name in "ab"))
    trials = TrialLog(tmp_path).load()
    assert sorted(t.trial for t in trials) == list(range(40))
    for name in "ab":
        mine = [t.decisions["block_kv"] for t in trials if t.problem == name]
        assert mine == list(range(20))


def _damage_often(folder: Path) -> None:
    for _ in range(20):
        with (folder / "trials.jsonl").open("ab") as stream:
            stream.write(b"noise\n")
        time.sleep(0.002)


@pytest.mark.filterwarnings("ignore:.* is no trial:RuntimeWarning")
def test_writers_land_while_the_log_is_mended(tmp_path: Path) -> None:
    """I09: mending replaces the file, and who waited for the old one's lock takes the new one."""
    TrialLog(tmp_path).append(**a_trial(0, problem="first"))
    writers = [(_write_many, (tmp_path, name)) for name in "abc"]
    _together(*writers, (_damage_often, (tmp_path,)))
    log = TrialLog(tmp_path)
    log.append(**a_trial(0, problem="last"))
    found = loads_cleanly(log)
    assert [found.count(name) for name in ("first", "a", "b", "c", "last")] == [1, 20, 20, 20, 1]
    assert len({trial.trial for trial in log.load()}) == len(found)


def test_second_job_in_a_folder_is_refused(tmp_path: Path) -> None:
    """I09: two jobs at once would disturb each other's timing."""
    with job_lock(tmp_path), pytest.raises(JobBusy, match="in use"), job_lock(tmp_path):
        pass
    with job_lock(tmp_path):
        pass


def _hold(folder: Path, held: Any) -> None:
    with job_lock(folder):
        held.set()
        time.sleep(60)


def test_the_lock_of_a_killed_job_is_free(tmp_path: Path) -> None:
    """J05 (FI #972): a lock that outlives its process would be waited for for ever."""
    context = multiprocessing.get_context("fork")
    held = context.Event()
    job = context.Process(target=_hold, args=(tmp_path, held))
    job.start()
    assert held.wait(30)
    with pytest.raises(JobBusy), job_lock(tmp_path):
        pass
    assert job.pid is not None
    os.kill(job.pid, signal.SIGKILL)
    job.join()
    with job_lock(tmp_path):
        pass


def _stop_with_the_lock(folder: Path, path: Path) -> None:
    """Hold the locks of a folder and a file, and stop, as Ctrl-Z does."""
    handles = [os.open(place, os.O_RDONLY) for place in (folder, path)]
    for handle in handles:
        fcntl.flock(handle, fcntl.LOCK_EX)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_process_holds_nobody_up_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J05 (FI #972), where the holder lives on; once it moves, all goes on."""
    monkeypatch.setattr(files, "LOCK_PATIENCE_S", 0.1)
    log, record = TrialLog(tmp_path), a_record(a_problem())
    log.append(**a_trial(0))
    holder = multiprocessing.get_context("fork").Process(
        target=_stop_with_the_lock, args=(tmp_path, log.path)
    )
    holder.start()
    assert holder.pid is not None
    try:
        os.waitpid(holder.pid, os.WUNTRACED)
        for use in (
            lambda: log.append(**a_trial(1)),
            lambda: merge_records(tmp_path / "forward.jsonl", [record]),
        ):
            with pytest.raises(StoreUnavailable, match=r"locked by another process for 0\.1 s"):
                use()
        assert len(log.load()) == 1
        os.kill(holder.pid, signal.SIGCONT)
        monkeypatch.setattr(files, "LOCK_PATIENCE_S", 60.0)
        log.append(**a_trial(1))
        merge_records(tmp_path / "forward.jsonl", [record])
        assert [trial.trial for trial in log.load()] == [0, 1]
    finally:
        holder.kill()
        holder.join()


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "7", '{"runs": 3}', '{"verdicts": {}}', "[" * 100_000, "\0"]
)
def test_a_damaged_job_file_is_kept_aside(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(damage)
    add_verdict(tmp_path, 3, [])
    assert path.with_suffix(".json.unreadable").read_text() == damage
    add_verdict(tmp_path, 4, [])
    assert [verdict["winner"] for verdict in json.loads(path.read_text())["verdicts"]] == [3, 4]


# Places that cannot be written.


@contextmanager
def full_disk(bytes_left: int) -> Iterator[None]:
    """No file may grow beyond so many bytes, as on a full disk: writes are cut short, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def one_sentence(error: BaseException, path: Path) -> bool:
    text = str(error)
    return str(path) in text and "\n" not in text and text.endswith("choose another folder.")


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_full_disk_is_one_sentence_and_leaves_no_half_line(room: int, log: TrialLog) -> None:
    before = log.path.read_bytes()
    with full_disk(len(before) + room), pytest.raises(StoreUnavailable) as refused:
        log.append(**a_trial(3))
    assert one_sentence(refused.value, log.path)
    assert log.path.read_bytes() == before
    assert log.append(**a_trial(3)).trial == 3
    assert loads_cleanly(log) == ["p0", "p1", "p2", "p3"]


@pytest.mark.filterwarnings("ignore:.* is no trial:RuntimeWarning")
def test_a_full_disk_while_mending_keeps_the_damaged_log(log: TrialLog) -> None:
    before = log.path.read_bytes() + b"noise\n"
    log.path.write_bytes(before)
    with full_disk(30), pytest.raises(StoreUnavailable):
        log.append(**a_trial(3))
    assert log.path.read_bytes() == before


def test_a_full_disk_keeps_the_old_records(tmp_path: Path) -> None:
    path = tmp_path / "forward.jsonl"
    merge_records(path, [a_record()])
    before = path.read_bytes()
    with full_disk(100), pytest.raises(StoreUnavailable) as refused:
        merge_records(path, [a_record(a_problem(8192))])
    assert one_sentence(refused.value, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_vanished_folder_is_one_sentence(log: TrialLog) -> None:
    log.path.unlink()
    log.folder.rmdir()
    with pytest.raises(StoreUnavailable) as refused:
        log.append(**a_trial(3))
    assert one_sentence(refused.value, log.path)
    with pytest.raises(StoreUnavailable):
        write_atomically(log.folder / "job.json", "{}")


@pytest.mark.parametrize("where", ["file", "nothing"])
def test_a_place_that_is_no_folder_is_one_sentence(where: str, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    folder = blocked / "logs" if where == "file" else Path("/proc/nothing/logs")
    for use in (TrialLog, lambda path: job_lock(path).__enter__()):
        with pytest.raises(StoreUnavailable) as refused:
            use(folder)
        assert one_sentence(refused.value, folder)


def as_nobody(work: Callable[[], bool]) -> bool:
    """Whether something holds in a child without root's right to write anywhere."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def open_to_nobody(folder: Path) -> None:
    """Let everybody read a folder of a test: pytest's own are closed."""
    for path in (folder, *folder.parents):
        if path.name.startswith(("pytest-", "test_")):
            path.chmod(path.stat().st_mode | 0o055)


def test_a_read_only_folder_is_one_sentence(log: TrialLog) -> None:
    open_to_nobody(log.folder)
    log.folder.chmod(0o555)

    def refused() -> bool:
        try:
            log.append(**a_trial(3))
        except StoreUnavailable as error:
            return one_sentence(error, log.path) and "denied" in str(error)
        return False

    assert as_nobody(refused)
    assert as_nobody(lambda: len(log.load()) == 3)
    log.folder.chmod(0o755)


# Records.


def test_merging_keeps_damaged_lines_aside(tmp_path: Path) -> None:
    path = tmp_path / "forward.jsonl"
    merge_records(path, [a_record()])
    path.write_bytes(path.read_bytes() + b"{half\n")
    merge_records(path, [a_record(a_problem(8192))])
    records, complaints = read_records(path)
    assert (len(records), complaints) == (2, [])
    assert path.with_name("forward.jsonl.damaged").read_bytes() == b"{half\n"


def test_verdicts_of_two_processes_both_land(tmp_path: Path) -> None:
    """I09: reading, merging and writing is one step."""
    path = tmp_path / "forward.jsonl"
    start = threading.Barrier(4)

    def promote(first: int) -> None:
        start.wait()
        for n in range(8):
            merge_records(path, [a_record(a_problem(first + n))])

    workers = [threading.Thread(target=promote, args=(100 * n,)) for n in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(read_records(path)[0]) == 32


def test_a_trial_says_what_is_wrong_with_it() -> None:
    with pytest.raises(CorruptRecord, match=r"here:4 is no trial \(a time is -1"):
        Trial.from_line(GOOD.replace(b"[]", b"[-1]"), "here:4")
