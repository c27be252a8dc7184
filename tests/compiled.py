"""Compile a family's default schedule for this machine, many variants at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from fa2tvm import compile as compiler
from fa2tvm.device import detect, usable_cores
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule, schedule_class


def build(variant: Variant, family: str = "cpu", schedule: Schedule | None = None) -> Path:
    """The folder of the compiled module, by default of the family's default schedule."""
    chosen = schedule or schedule_class(family, variant.pass_).default(variant, detect())
    return compiler.build(variant, chosen, detect())


def build_all(variants: Iterable[Variant]) -> None:
    """Compile what is missing on all cores, so that the tests after it only load."""
    todo = sorted(set(variants), key=lambda v: v.name)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(usable_cores(), mp_context=context) as pool:
        list(pool.map(build, todo, chunksize=4))
