"""Which compiled module answers a problem, and the ways to say so."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fa2tvm import compile as compiler
from fa2tvm import jit, linker, pack
from fa2tvm.compile import Module
from fa2tvm.device import Device, detect
from fa2tvm.errors import CompileFailed, StoreUnavailable, UnsupportedProblem, shown
from fa2tvm.lookup import FAMILIES, Stored, lookup, stored_now
from fa2tvm.problem import Problem, Variant
from fa2tvm.schedule import Schedule

_log = logging.getLogger("fa2tvm")
# Answers are kept per problem; a program that meets more problems than this starts anew.
MAX_ANSWERS = 4096
# Answers in the form that a caller likes best; emptied whenever another module may be chosen.
prepared: dict[Any, Any] = {}

_lock = threading.RLock()
_answers: dict[tuple[Problem, Device | None, bool], Module] = {}
_loaded: dict[tuple[Variant, Schedule, Device], Module] = {}
_stored: dict[tuple[str, Device], Stored] = {}
_packs: list[Module] = []
_explicit: dict[str, Schedule] = {}
_may_compile = True


def module_for(
    problem: Problem, device: Device | None = None, *, deterministic: bool = False
) -> Module:
    """The module that computes a problem: chosen, compiled if need be, loaded, remembered.

    An explicit schedule (`use_schedule`) goes first, then packs (`use_pack`, the latest first),
    then `lookup`, whose schedule is compiled on its first use.

    Parameters
    ----------
    device
        The GPU that the tensors are on (`cuda_runtime.device`), or another device to compile for;
        by default the CPU at hand.
    deterministic
        Of the schedules, one whose results are the same bits in every run (a GPU's dQ else is not).

    Raises
    ------
    CompileFailed, InfeasibleSchedule, StaleModule
        As `compile.build` and `compile.load` do.
    UnsupportedProblem
        Where no kernel family can do it on the device.
    """
    key = (problem, device, deterministic)
    found = _answers.get(key)
    if found is not None:
        return found
    with _lock:
        found = _answers.get(key)
        if found is None:
            if len(_answers) >= MAX_ANSWERS:
                _answers.clear()
            found = _answers[key] = _find(problem, device, deterministic)
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
    modules = pack.load_pack(path, trust=trust)
    with _lock:
        _packs[:0] = modules
        forget()
    return modules


@contextmanager
def use_schedule(schedule: Schedule) -> Iterator[None]:
    """Compute everything of the schedule's pass with it, in all threads, until the block ends."""
    if not isinstance(schedule, Schedule):
        raise UnsupportedProblem(
            f"schedule is {shown(schedule)}, but it must be a Schedule; make one."
        )
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


@contextmanager
def without_compiling() -> Iterator[None]:
    """Take only modules that are there already, in all threads, until the block ends.

    A call whose module is not raises CompileFailed instead of holding up what cannot wait.
    """
    global _may_compile
    before, _may_compile = _may_compile, False
    try:
        yield
    finally:
        _may_compile = before


def forget() -> None:
    """Choose modules anew from the next call on, e.g. after tuning; loaded ones stay loaded."""
    with _lock:
        _answers.clear()
        _stored.clear()
        prepared.clear()


def _find(problem: Problem, device: Device | None, deterministic: bool) -> Module:
    for name, value, kind in (("problem", problem, Problem), ("device", device, Device)):
        if not isinstance(value, kind) and not (name == "device" and value is None):
            raise UnsupportedProblem(
                f"{name} is {shown(value)}, but it must be a {kind.__name__}; make one."
            )
    explicit = _explicit.get(problem.variant.pass_)
    if explicit is not None and explicit.family not in FAMILIES[(device or detect()).kind]:
        explicit = None
    if explicit is None:
        for wanted in (problem.length_class, None):
            fits = [
                module
                for module in _packs
                if module.variant == problem.variant
                and module.length_class == wanted
                and _is_for(module, device)
                and (not deterministic or _is_deterministic(module.schedule))
            ]
            if fits:
                # One that is deterministic though nobody asks for it is slower: the last choice.
                return min(fits, key=lambda module: _is_deterministic(module.schedule))
    device = device or detect()
    pass_ = problem.variant.pass_
    if (pass_, device) not in _stored:
        _stored[pass_, device] = stored_now(pass_, device)
    found = lookup(problem, device, explicit=explicit, stored=_stored[pass_, device])
    schedule: Any = found.schedule
    if deterministic and not _is_deterministic(schedule):
        schedule = dataclasses.replace(schedule, deterministic=True)
        schedule.require_feasible(problem.variant, device)
    key = (problem.variant, schedule, device)
    if key not in _loaded:
        _loaded[key] = _load(*key)
    return _loaded[key]


def _is_deterministic(schedule: Schedule) -> bool:
    """Whether its results are the same bits in every run; those without the decision always are."""
    return bool(getattr(schedule, "deterministic", True))


def _is_for(module: Module, device: Device | None) -> bool:
    """Whether a pack's module runs on a device: the CPU at hand, or a GPU of its architecture."""
    target = module.manifest["target"]
    if device is None:
        return bool(target["kind"] == "llvm")
    return bool(target["kind"] == device.kind == "cuda" and target["arch"] == device.arch)


def _load(variant: Variant, schedule: Schedule, device: Device) -> Module:
    """The compiled program, from a module folder or, without linker or room, from this process."""
    if not _may_compile and not compiler.is_built(variant, schedule, device):
        raise CompileFailed(
            f"{variant.name} with schedule {schedule.to_dict()} is not compiled yet, and nothing "
            "may be compiled now; build it before."
        )
    if device.kind == "cuda" or linker.find() or compiler.is_built(variant, schedule, device):
        try:
            return compiler.load(compiler.build(variant, schedule, device))
        except StoreUnavailable as error:
            if device.kind == "cuda":
                raise
            _log.warning("%s Until then each process compiles for itself.", error)
    return jit.load(variant, schedule, device)


def _after_fork() -> None:
    """Another thread may have held the lock; it does not exist in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
