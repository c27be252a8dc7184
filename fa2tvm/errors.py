"""The vocabulary of errors.

Each message is one sentence with the argument, its value, the limit and the remedy.
"""

from __future__ import annotations


def shown(value: object) -> str:
    """A value as an error names it: on one line, and not longer than a sentence bears."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


class Fa2tvmError(Exception):
    """Base of every error that fa2tvm raises on purpose."""


class UnsupportedProblem(Fa2tvmError, ValueError):
    """The caller asks for something that no kernel family can do, or contradicts itself."""


class InfeasibleSchedule(Fa2tvmError, ValueError):
    """A schedule does not fit its variant or its device."""


class CorruptRecord(Fa2tvmError, ValueError):
    """A stored schedule or tuning record cannot be read or does not validate."""


class PeerUnavailable(Fa2tvmError, RuntimeError):
    """A peer of the benchmark cannot run here; the message is the reason."""


class CompileFailed(Fa2tvmError, RuntimeError):
    """The TVM compiler is absent, or it refused a program."""


class StaleModule(Fa2tvmError, RuntimeError):
    """A stored module does not match its checksum, its versions or this machine."""


class JobBusy(Fa2tvmError, RuntimeError):
    """Another process tunes in the same folder."""


class ServerUnavailable(Fa2tvmError, RuntimeError):
    """No server of a tracker takes a tuning job, or a tracker does not answer."""


class StoreUnavailable(Fa2tvmError, OSError):
    """A file or folder of the user's cannot be written: full, read-only or gone."""


def require_at_least(least: float, **values: float | None) -> None:
    """Refuse numbers below a limit, and what is no number; None stands for none.

    Raises
    ------
    UnsupportedProblem
        Naming the first of them.
    """
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value < float("inf")):
            raise UnsupportedProblem(
                f"{name} is {shown(value)}, but it must be a number from {least} on; change it."
            )
