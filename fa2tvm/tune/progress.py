"""A tuning job on the screen: trials, best so far, time left."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fa2tvm.tune.nouns import Progress

# Where there is no terminal, a line at most this often.
_SECONDS_PER_LINE = 5.0


class LiveProgress:
    """Shows the `Progress` of jobs: live lines in a terminal, now and then a line elsewhere.

    Parameters
    ----------
    title
        What is tuned, where `show` does not say it.
    console
        Where to show it; standard error by default.
    """

    def __init__(self, title: str = "", console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._started = time.monotonic()
        self._states: dict[str, Progress] = {}
        self._next_line: dict[str, float] = {}

    def __enter__(self) -> LiveProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, progress: Progress, title: str | None = None) -> None:
        """Show where a job stands; pass this as `progress` to `tune`."""
        title = self._title if title is None else title
        self._states[title] = progress
        if self._console.is_terminal:
            self._live.update(self._lines())
            return
        now = time.monotonic()
        if now >= self._next_line.get(title, 0.0) or progress.phase in ("starting", "done"):
            self._next_line[title] = now + _SECONDS_PER_LINE
            self._console.print(f"{title}: {describe(progress)}", soft_wrap=True, highlight=False)

    def drop(self, title: str) -> None:
        """Take a job that has ended from the screen."""
        self._states.pop(title, None)
        if self._console.is_terminal:
            self._live.update(self._lines())

    def _lines(self) -> Table:
        rows = Table.grid(padding=(0, 1))
        for title, progress in self._states.items():
            bar = ProgressBar(total=1.0, completed=self._share(progress), width=20)
            rows.add_row(Text(title, style="bold"), bar, describe(progress))
        return rows

    def _share(self, progress: Progress) -> float:
        elapsed = time.monotonic() - self._started
        shares = [0.0]
        if progress.budget:
            shares.append(progress.trials / progress.budget)
        if progress.seconds_left is not None and elapsed:
            shares.append(elapsed / (elapsed + progress.seconds_left))
        return min(1.0, max(shares))


def describe(progress: Progress) -> str:
    """A job's state in words."""
    of = f" of {progress.budget}" if progress.budget else ""
    parts = [f"{progress.trials}{of} trials"]
    if progress.failed:
        parts[0] += f" ({progress.failed} failed)"
    if progress.best_us and progress.default_us and progress.gflops:
        parts.append(
            f"best {milliseconds(progress.best_us)}, {progress.gflops:.0f} GFLOP/s, "
            f"{progress.default_us / progress.best_us:.2f} x the default"
        )
    if progress.seconds_left is not None and progress.phase != "done":
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    parts.append(progress.phase)
    return ", ".join(parts)


def milliseconds(us: float) -> str:
    """A time with three significant digits."""
    return f"{us / 1000:.3g} ms"
