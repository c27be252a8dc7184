"""Loops of several variants beside each other: one GPU, all cores, none waiting for another.

A Hopper module takes seconds of a core, and its check and its times a tenth of a second of the GPU:
the builds decide how long tuning takes. So all loops have builds waiting, the oldest loop's first,
and whichever has results to measure goes on. Only the oldest loop's seconds run; the others live on
what it leaves, and verdicts come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.tune.loop import Awaited, Loop
from fa2tvm.tune.nouns import JobResult

Finished = Callable[[int, "list[JobResult] | InfeasibleSchedule"], None]


def run_beside(loops: Sequence[Loop | None], resume: bool, finished: Finished) -> bool:
    """Run loops until all have ended; False unless an interrupt ended them.

    Parameters
    ----------
    loops
        None is a number without a loop.
    finished
        Gets the number of each loop as it ends, and what it found or why it could not begin. After
        an interrupt (Ctrl-C) all that have measured their default end at once.

    Raises
    ------
    KeyboardInterrupt
        Where the interrupt came before any of those left had measured its default.
    """
    loop = {number: loop for number, loop in enumerate(loops) if loop is not None}
    going: dict[int, Iterator[Awaited]] = {n: its.steps(resume) for n, its in loop.items()}
    awaited: dict[int, Awaited] = {}

    def advance(number: int) -> None:
        try:
            awaited[number] = next(going[number])
        except StopIteration:
            del going[number]
            finished(number, loop[number].results())
        except InfeasibleSchedule as error:
            del going[number]
            finished(number, error)

    try:
        for number in list(going):
            loop[min(going)].budget.begin()
            advance(number)
        while going:
            loop[min(going)].budget.begin()
            ready = next((n for n in sorted(going) if awaited[n].is_over), None)
            if ready is None:
                builds = {b for n in going for b in awaited[n].builds if not b.done()}
                wait(builds, return_when=FIRST_COMPLETED)
            else:
                advance(ready)
    except KeyboardInterrupt:
        left = [number for number in sorted(going) if loop[number].has_results]
        if not left:
            raise
        for number in left:
            finished(number, loop[number].results())
        return True
    return False
