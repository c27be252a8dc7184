"""The vocabulary of errors.

Each message is one sentence with the argument, its value, the limit and the remedy.
"""


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
