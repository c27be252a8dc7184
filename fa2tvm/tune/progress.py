"""How a running job shows itself: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fa2tvm.tune.job import Progress

_PLAIN_EVERY_S = 5.0


class LiveProgress:
    """Shows the progress of one job; use as a context manager and pass `show` to the job."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console) if self._console.is_terminal else None
        self._last_plain_s = -_PLAIN_EVERY_S

    def __enter__(self) -> LiveProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Show where the job stands."""
        line = f"{self._title}: {describe(progress)}"
        if self._live is not None:
            self._live.update(Text(line))
            return
        now = time.monotonic()
        if progress.phase in ("starting", "done") or now - self._last_plain_s >= _PLAIN_EVERY_S:
            self._last_plain_s = now
            self._console.print(line, soft_wrap=True, highlight=False)


def describe(progress: Progress) -> str:
    """Trials, best so far, phase and time left, as one line."""
    of_budget = f"/{progress.budget}" if progress.budget is not None else ""
    parts = [f"{progress.trials}{of_budget} trials"]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.best_us is not None:
        best = f"best {progress.best_us / 1000:.2f} ms"
        if progress.default_us is not None:
            best += f", {progress.default_us / progress.best_us:.2f} x the default"
        if progress.gflops is not None:
            best += f", {progress.gflops:.0f} GFLOP/s"
        parts.append(best)
    parts.append(progress.phase)
    if progress.phase != "done" and progress.seconds_left is not None:
        minutes, seconds = divmod(int(progress.seconds_left), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return "; ".join(parts)
