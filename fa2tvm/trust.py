"""Who else may change a file that holds code."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

from fa2tvm.errors import StaleModule


def require_private(*paths: Path) -> None:
    """Refuse files and folders that other users may write.

    Raises
    ------
    StaleModule
        Naming the first such path, who may write it, and the remedy; or where one has vanished.
    """
    for path in paths:
        try:
            reason = others_may_write(path)
        except OSError as error:
            raise StaleModule(f"{path} cannot be looked at ({error}); export it again.") from error
        if reason is not None:
            raise _refusal(path, reason)


def _refusal(path: Path, reason: str) -> StaleModule:
    return StaleModule(
        f"{path} {reason}, but code that others may write is not loaded; take away their "
        "permission or pass trust=True."
    )


def contents(path: Path, most_bytes: int, *, trust: bool) -> bytes:
    """The bytes of a file that is no link, and that others may not write unless `trust` says so.

    The file that is judged is the one that is read, whatever its path leads to a moment later.

    Raises
    ------
    OSError
        Where it cannot be read.
    StaleModule
        Where it is a link, no plain file (opening a pipe would wait for ever), or too large, or
        others may write it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StaleModule(
            f"{path} is a symbolic link, but packs and modules hold their files themselves; copy "
            "it into the folder."
        ) from error
    with open(handle, "rb") as stream:  # noqa: PTH123 - a descriptor
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
            kind = f"has {found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "is no file"
            raise StaleModule(
                f"{path} {kind}, but it must be a file of at most {most_bytes}; export it again."
            )
        reason = None if trust else _writers(found, handle)
        if reason is not None:
            raise _refusal(path, reason)
        return stream.read(most_bytes)


def others_may_write(path: Path) -> str | None:
    """How users other than this one and root may replace a file or folder; None if they cannot.

    Its owner and mode count, and the mode of every folder above it: in a folder that all may write
    and that is not sticky, anybody can put another file in its place.
    """
    path = path.resolve()
    reason = _writers(path.stat(), path)
    if reason is not None:
        return reason
    for folder in path.parents:
        mode_above = folder.stat().st_mode
        if mode_above & stat.S_IWOTH and not mode_above & stat.S_ISVTX:
            return f"lies in {folder} of mode {stat.S_IMODE(mode_above):o}"
    return None


def _writers(found: os.stat_result, place: Path | int) -> str | None:
    """Who but this user and root may write what was found at a path or descriptor."""
    mode = f"has mode {stat.S_IMODE(found.st_mode):o}"
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if found.st_mode & stat.S_IWOTH:
        return mode
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"{mode} and group {found.st_gid}"
    # With a list, the group's bits are what it gives to anybody at most (acl(5)).
    if found.st_mode & stat.S_IWGRP and _has_list(place):
        return f"{mode} and an access control list"
    return None


def _has_list(place: Path | int) -> bool:
    try:
        return bool(os.getxattr(place, "system.posix_acl_access"))
    except (AttributeError, OSError):  # none, or a system or file system without them
        return False


def _is_own_group(gid: int) -> bool:
    """Whether nobody but this user and root is in a group, as in a user's private group."""
    if gid == 0:
        return True
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        members = set()
    members |= {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
    own = {user.pw_name for user in pwd.getpwall() if user.pw_uid in (0, os.geteuid())}
    return members <= own and (bool(members) or gid == os.getegid())
