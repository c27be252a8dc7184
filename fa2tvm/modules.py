"""Which compiled module answers a problem, and the ways to say so."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fa2tvm import compile as compiler
from fa2tvm import jit
from fa2tvm.compile import Module
from fa2tvm.device import Device, detect
from fa2tvm.lookup import Stored, lookup, stored_now
from fa2tvm.problem import Problem, Variant
from fa2tvm.schedule import Schedule

# Answers are kept per problem; a program that meets more problems than this starts anew.
MAX_ANSWERS = 4096
# Answers in the form that a caller likes best; emptied whenever another module may be chosen.
prepared: dict[Any, Any] = {}

_lock = threading.RLock()
_answers: dict[tuple[Problem, Device | None], Module] = {}
_loaded: dict[tuple[Variant, Schedule, Device], Module] = {}
_stored: dict[tuple[str, Device], Stored] = {}
_packs: list[Module] = []
_explicit: dict[str, Schedule] = {}


def module_for(problem: Problem, device: Device | None = None) -> Module:
    """The module that computes a problem: chosen, compiled if need be, loaded, remembered.

    An explicit schedule (`use_schedule`) goes first, then packs (`use_pack`, the latest first),
    then `lookup`, whose schedule is compiled on its first use.

    Parameters
    ----------
    device
        Compile for this device instead of the one at hand.

    Raises
    ------
    CompileFailed, InfeasibleSchedule, StaleModule
        As `compile.build` and `compile.load` do.
    """
    key = (problem, device)
    found = _answers.get(key)
    if found is not None:
        return found
    with _lock:
        found = _answers.get(key)
        if found is None:
            if len(_answers) >= MAX_ANSWERS:
                _answers.clear()
            found = _answers[key] = _find(problem, device)
    return found


def use_pack(path: str | os.PathLike[str], *, trust: bool = False) -> list[Module]:
    """Load a pack and prefer its modules from now on.

    Parameters
    ----------
    trust
        Load it although other users of this machine may write to it.

    Returns
    -------
    list
        Its modules that this CPU can run.

    Raises
    ------
    StaleModule
        Where the pack is damaged, or its versions or CPU features do not fit.
    """
    modules = compiler.load_pack(path, trust=trust)
    with _lock:
        _packs[:0] = modules
        forget()
    return modules


@contextmanager
def use_schedule(schedule: Schedule) -> Iterator[None]:
    """Compute everything of the schedule's pass with it, in all threads, until the block ends."""
    with _lock:
        before = _explicit.get(schedule.pass_)
        _explicit[schedule.pass_] = schedule
        forget()
    try:
        yield
    finally:
        with _lock:
            if before is None:
                del _explicit[schedule.pass_]
            else:
                _explicit[schedule.pass_] = before
            forget()


def forget() -> None:
    """Choose modules anew from the next call on, e.g. after tuning; loaded ones stay loaded."""
    with _lock:
        _answers.clear()
        _stored.clear()
        prepared.clear()


def _find(problem: Problem, device: Device | None) -> Module:
    explicit = _explicit.get(problem.variant.pass_)
    if explicit is None and device is None:
        for wanted in (problem.length_class, None):
            for module in _packs:
                if module.variant == problem.variant and module.length_class == wanted:
                    return module
    device = device or detect()
    pass_ = problem.variant.pass_
    if (pass_, device) not in _stored:
        _stored[pass_, device] = stored_now(pass_, device)
    found = lookup(problem, device, explicit=explicit, stored=_stored[pass_, device])
    key = (problem.variant, found.schedule, device)
    if key not in _loaded:
        _loaded[key] = _load(*key)
    return _loaded[key]


def _load(variant: Variant, schedule: Schedule, device: Device) -> Module:
    """The compiled program, from a module folder or, without a linker, from this process."""
    if compiler.find_linker() or compiler.is_built(variant, schedule, device):
        return compiler.load(compiler.build(variant, schedule, device))
    return jit.load(variant, schedule, device)


def _after_fork() -> None:
    """Another thread may have held the lock; it does not exist in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
