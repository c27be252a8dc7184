"""Problems on the command line, by name or by shape flags: one group of options."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fa2tvm.device import GPUS, Device, baseline, detect, gpu
from fa2tvm.errors import UnsupportedProblem
from fa2tvm.problem import PASSES, DType, PassName, Problem, Shape, Variant
from fa2tvm.workloads import WORKLOADS, named, tagged

if TYPE_CHECKING:
    from fa2tvm.tune.tracker import Server

DTYPES: tuple[DType, ...] = get_args(DType)
_PANEL = "Problems"
_FULL_NAME = re.compile(rf"({'|'.join(PASSES)})_({'|'.join(DTYPES)})_(.+)")

Flag = functools.partial(typer.Option, rich_help_panel=_PANEL, show_default=False)


def problems_of(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROBLEM]...",
            help="Names (see `fa2tvm schedules --problems`) or sizes like "
            "d64_causal_b1_h8q2_q2048; a prefix like backward_float16_ narrows pass and dtype.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    tag: Annotated[
        str | None, Flag(help="All problems with this tag (see `fa2tvm schedules --problems`).")
    ] = None,
    seq_q: Annotated[int | None, Flag(help="Query length; makes a problem from flags.")] = None,
    seq_kv: Annotated[int | None, Flag(help="Key length (default: seq-q).")] = None,
    head_dim: Annotated[int | None, Flag(help="Head dim of Q and K (default: 64).")] = None,
    head_dim_v: Annotated[int | None, Flag(help="Head dim of V (default: head-dim).")] = None,
    batch: Annotated[int | None, Flag(help="Batch size (default: 1).")] = None,
    heads: Annotated[int | None, Flag(help="Query heads (default: 8).")] = None,
    heads_kv: Annotated[int | None, Flag(help="Key and value heads (default: heads).")] = None,
    causal: Annotated[bool, Flag("--causal", help="With a causal mask.")] = False,
    top_left: Annotated[
        bool, Flag("--top-left", help="Align it top-left (default: bottom-right, as flash_attn).")
    ] = False,
    pass_: Annotated[
        list[str] | None,
        Flag("--pass", help="forward or backward (default: both)."),
    ] = None,
    dtype: Annotated[
        list[str] | None, Flag(help="float32, float16, bfloat16; may repeat (default: float32).")
    ] = None,
) -> list[Problem]:
    """The problems that the options name, each pass and dtype of each.

    Raises
    ------
    UnsupportedProblem
        For an unknown name or value, or flags that make no problem.
    """
    passes, dtypes = choose("pass", pass_, PASSES), choose("dtype", dtype, DTYPES)
    found: list[Problem] = []
    for name in [*(names or ()), *(w.name for w in (tagged(tag) if tag else ()))]:
        found += by_name(name, passes, dtypes or ("float32",))
    sizes = (seq_kv, head_dim, head_dim_v, batch, heads, heads_kv)
    if seq_q is None and (causal or top_left or any(size is not None for size in sizes)):
        raise UnsupportedProblem(
            "--seq-q is missing, but a problem from flags needs at least the query length."
        )
    if seq_q is not None:
        n_heads = 8 if heads is None else heads
        d = 64 if head_dim is None else head_dim
        shape = Shape(
            1 if batch is None else batch,
            n_heads,
            n_heads if heads_kv is None else heads_kv,
            seq_q,
            seq_q if seq_kv is None else seq_kv,
        )
        for p in passes or PASSES:
            for t in dtypes or ("float32",):
                variant = Variant(p, t, d, d if head_dim_v is None else head_dim_v, causal)
                found.append(Problem(variant, shape, "top_left" if top_left else "bottom_right"))
    if not found and (passes or dtypes):
        raise UnsupportedProblem(
            "--pass and --dtype narrow problems, but none is given; name one or pass --tag."
        )
    return list(dict.fromkeys(found))


Choice = typing.TypeVar("Choice", bound=str)


def choose(what: str, given: list[str] | None, known: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """The given values, each one of the known; empty where none is given.

    Raises
    ------
    UnsupportedProblem
        For a value that is not known.
    """
    for value in given or ():
        if value not in known:
            raise UnsupportedProblem(
                f"{what} is {value!r}, but only {', '.join(known)} exist; choose one."
            )
    return tuple(value for value in known if value in (given or ()))


def by_name(name: str, passes: tuple[PassName, ...], dtypes: tuple[DType, ...]) -> list[Problem]:
    """The problems of a workload's name, of sizes, or of a `Problem.name`."""
    full = _FULL_NAME.fullmatch(name) if name not in WORKLOADS else None
    if full:
        pass_, dtype = typing.cast(PassName, full[1]), typing.cast(DType, full[2])
        return [named(full[3]).problem(pass_, dtype)]
    workload = named(name)
    return [workload.problem(p, t) for p in passes or PASSES for t in dtypes]


def takes_problems(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `problems_of`; it receives `problems` in their place."""
    options = inspect.signature(problems_of, eval_str=True)
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def with_problems(**values: Any) -> None:
        asked = {name: values.pop(name) for name in options.parameters}
        command(problems=problems_of(**asked), **values)

    parameters = [*options.parameters.values()]
    parameters += [p for name, p in own.parameters.items() if name != "problems"]
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    with_problems.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    with_problems.__annotations__ = {p.name: p.annotation for p in keyword_only}
    return with_problems


def require_some(problems: list[Problem]) -> list[Problem]:
    """The problems.

    Raises
    ------
    UnsupportedProblem
        Where there is none.
    """
    if not problems:
        raise UnsupportedProblem(
            "no problem is given; name one, like d64_causal_b1_h8_q2048, or pass --seq-q."
        )
    return problems


DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="native (this CPU), cuda (this machine's GPU), a GPU by name like nvidia_h200, or a "
        "portable level: x86-64-v3, x86-64-v4.",
        show_default=True,
    ),
]


def device_named(name: str) -> Device:
    """The CPU at hand for "native", the GPU at hand for "cuda", else a GPU or a level by name.

    Raises
    ------
    UnsupportedProblem
        For a name of neither, or "cuda" where there is no GPU.
    """
    if name == "native":
        return detect()
    if name == "cuda":
        return gpu_at_hand()
    return gpu(name) if is_gpu(name) else baseline(name)


TrackerOption = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of a tracker of TVM's RPC: candidates run on one of its servers (see "
        "`fa2tvm serve`), whose device it is unless --device names one.",
        show_default=False,
    ),
]
KeyOption = Annotated[
    str | None, typer.Option(help="Key of the servers at the tracker.", show_default=False)
]
ServerTimeoutOption = Annotated[
    float, typer.Option(help="Seconds to wait for a server that is free.")
]


def place_of(
    device: str, tracker: str | None, key: str | None, timeout_s: float
) -> tuple[Device, Server | None]:
    """The device that options name, and where it is: None is here.

    Raises
    ------
    ServerUnavailable
        Where no server is to be had.
    UnsupportedProblem
        For a tracker without a key, a key without a tracker, or what `device_named` refuses.
    """
    if tracker is None and key is None:
        return device_named(device), None
    if tracker is None or key is None:
        given, missing = ("--key", "--tracker") if tracker is None else ("--tracker", "--key")
        raise UnsupportedProblem(f"{given} is given, but {missing} is not; give both or neither.")
    from fa2tvm.tune.remote import about
    from fa2tvm.tune.tracker import Server

    server = Server(tracker, key, timeout_s)
    found = about(server)
    row = found["device"]
    there = Device(**{**row, "features": tuple(row["features"])})
    if device != "native" and device_named(device).slug != there.slug:
        raise UnsupportedProblem(
            f"device is {device!r}, but the server of key {key!r} is {there.slug}; leave --device "
            "out or give another key."
        )
    return there, replace(server, machine=found["machine"])


def is_gpu(name: str) -> bool:
    """Whether a device's name is "cuda" or that of a known GPU."""
    return name == "cuda" or name in GPUS or f"nvidia_{name}" in GPUS


def gpu_at_hand() -> Device:
    """PyTorch's current GPU.

    Raises
    ------
    UnsupportedProblem
        Where it sees none.
    """
    import torch

    from fa2tvm import cuda_runtime

    return cuda_runtime.device(torch.cuda.current_device() if torch.cuda.is_available() else 0)
