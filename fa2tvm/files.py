"""Files that several processes write: locks that die with their holder, failures in words."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fa2tvm.errors import StoreUnavailable

# What other processes do under a lock takes milliseconds, on a slow disk a second.
LOCK_PATIENCE_S = 60.0


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Say in one sentence what kept a file or folder from being written.

    Raises
    ------
    StoreUnavailable
        In place of any OSError: a full disk, a read-only or vanished folder.
    """
    try:
        yield
    except StoreUnavailable:
        raise
    except OSError as error:
        raise StoreUnavailable(
            f"{path} cannot be written ({error.strerror or error}); make room and give write "
            "permission, or choose another folder."
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for a folder's lock and hold it; it ends with the process, however that ends.

    Raises
    ------
    StoreUnavailable
        As `wait_for_lock`.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def wait_for_lock(handle: int, path: Path) -> None:
    """Lock an opened file or folder that other processes hold for moments only.

    Raises
    ------
    StoreUnavailable
        Where one holds it for a minute: it was stopped (Ctrl-Z, a debugger) just then.
    """
    if not lock_within(handle, LOCK_PATIENCE_S):
        raise StoreUnavailable(
            f"{path} has been locked by another process for {LOCK_PATIENCE_S:g} s; let that one go "
            "on, end it, or choose another folder."
        )


def lock_within(handle: int, seconds: float) -> bool:
    """Lock an opened file or folder; False where others hold it all that time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        else:
            return True
        time.sleep(0.01)


def keep_aside(path: Path, lines: list[bytes]) -> Path:
    """Append damaged lines of a file to `<its name>.damaged` beside it, and wait for the disk."""
    aside = path.with_name(f"{path.name}.damaged")
    with aside.open("ab") as stream:
        stream.write(b"".join(line + b"\n" for line in lines))
        stream.flush()
        os.fsync(stream.fileno())
    return aside


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary folder, removed at the end; a killed process's folder goes with the next call.

    Raises
    ------
    StoreUnavailable
        Where it cannot be made.
    """
    with storing(Path(os.environ.get("TMPDIR", "/tmp"))):
        _remove_abandoned(prefix)
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _remove_abandoned(prefix: str) -> None:
    """Remove folders whose maker is gone: nobody holds their lock, though they are a minute old."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            found = os.fstat(handle)
            if found.st_uid == os.geteuid() and found.st_mtime < time.time() - 60:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
