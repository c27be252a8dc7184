"""`fa2tvm`: what the package does, from the command line. Each command is a thin call of it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core

import fa2tvm
from fa2tvm.cli import measuring, picturing, proving, showing, tuning
from fa2tvm.errors import Fa2tvmError


@contextmanager
def _interruptible() -> Iterator[None]:
    """Have SIGTERM and a closed terminal (SIGHUP) end a command as Ctrl-C does.

    Workers and temporary folders go then, too. A signal that is ignored (nohup) stays ignored.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    asked = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        asked = []
    for number in asked:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)


class _OneSentence(typer.core.TyperGroup):
    """Errors of fa2tvm are one sentence on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _interruptible():
                return super().invoke(ctx)
        except Fa2tvmError as error:
            typer.echo(f"fa2tvm: {error}", err=True)
            raise typer.Exit(2) from None
        except OSError as error:
            # A file or folder that was named on the command line, for the most part.
            where = f" {error.filename}" if error.filename else ""
            typer.echo(
                f"fa2tvm: the file or folder{where} cannot be used ({error.strerror or error}); "
                "choose another or make room.",
                err=True,
            )
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("fa2tvm: interrupted.", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_OneSentence,
    help="FlashAttention-2 as TVM programs: tune, export, run from PyTorch, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fa2tvm {fa2tvm.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""
    del version


@app.command()
def demo(
    out: Annotated[str, typer.Option(help="Folder for the pack, the rows and the plot.")] = (
        "demo_output"
    ),
    seconds: Annotated[float, typer.Option(help="Tuning time of each pass.")] = 45.0,
) -> None:
    """Tune one attention problem, export it, run it from PyTorch without the compiler, compare."""
    from fa2tvm import demo

    sys.exit(demo.main(out, seconds))


showing.register(app)
tuning.register(app)
measuring.register(app)
proving.register(app)
picturing.register(app)
