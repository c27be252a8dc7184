"""Where compiled modules are kept: folders that appear and vanish in one rename, without locks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fa2tvm.lookup import home
from fa2tvm.trust import others_may_write


def root() -> Path:
    """The folder of compiled modules; a private temporary one, with a warning, if need be."""
    folder = home() / "cache"
    try:
        for made in (folder.parent, folder):
            made.mkdir(mode=0o755, parents=True, exist_ok=True)
        reason = others_may_write(folder)
        if reason is not None:
            reason = f"it {reason}, and the code of others would run here"
        elif os.access(folder, os.W_OK | os.X_OK):
            return folder
        else:
            reason = "it is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    return _temporary(folder, reason)


@functools.cache
def _temporary(wanted: Path, reason: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix="fa2tvm-cache-"))
    warnings.warn(
        f"compiled modules cannot be kept in {wanted} ({reason}); they go to {made} for this "
        "process, set FA2TVM_HOME to a folder of yours.",
        RuntimeWarning,
        stacklevel=4,
    )
    return made


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A folder beside the final one, so that a rename publishes it; removed if it is left over."""
    staged = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
    # What others may write is refused later, whatever the umask says.
    staged.chmod(0o755 & ~_umask())
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@functools.cache
def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def replace(staged: Path, folder: Path) -> None:
    """Publish a folder in the place of another: whoever looks finds the one or the other."""
    _close_to_others(staged)
    if not folder.exists():
        staged.rename(folder)
    elif not _exchange(staged, folder):
        with staging(folder.absolute().parent) as grave:
            old = folder.rename(grave / folder.name)
            try:
                staged.rename(folder)
            except OSError:
                old.rename(folder)
                raise


def _exchange(first: Path, second: Path) -> bool:
    """Have two folders change places in one step, where the system can (renameat2(2), Linux)."""
    current_folder, exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(renameat2(current_folder, names[0], current_folder, names[1], exchange) == 0)


def _close_to_others(staged: Path) -> None:
    for path in staged.iterdir():
        path.chmod(path.stat().st_mode & ~0o022)


def put(staged: Path, folder: Path) -> None:
    """Publish a folder; where another process was first, its equal result stands."""
    _close_to_others(staged)
    try:
        staged.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def discard(folder: Path) -> None:
    """Take a folder out of use in one rename, then delete it; others may do so at the same time."""
    if not folder.exists():
        return
    with staging(folder.absolute().parent) as grave, contextlib.suppress(FileNotFoundError):
        folder.rename(grave / folder.name)
