"""Right first, then timed: one workload, one dtype, every peer, interleaved."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from fa2tvm.bench import packages  # noqa: F401 - registers its peers
from fa2tvm.bench.check import Case, Oracle, Tensors
from fa2tvm.bench.clock import GpuClock
from fa2tvm.bench.gpu import Meter
from fa2tvm.bench.peers import PEERS, Peer, Prepared
from fa2tvm.bench.rows import Row, new_row
from fa2tvm.errors import Fa2tvmError, PeerUnavailable
from fa2tvm.problem import DType, PassName
from fa2tvm.workloads import Workload

# "both" is a forward and its backward in one timed call.
Pass: TypeAlias = "PassName | Literal['both']"
# Seconds of single calls, by workload, dtype, pass, mode and peer.
Pool: TypeAlias = "dict[tuple[str, ...], list[float]]"

# A peer is refused where its error is more than this many times that of plain PyTorch attention
# in the same dtype. Source: the yardstick of Dao-AILab/flash-attention's tests is 2.
YARDSTICK_OURS, YARDSTICK_PEERS = 2.0, 10.0
# A pool of idle threads spins for about a millisecond (libgomp), then sleeps.
_PAUSE_S = 0.01
# Below this a call is preceded by an untimed one, so that no peer pays for waking the threads.
_WAKE_BELOW_S = 0.05
_MAX_ROUNDS, _MIN_ROUNDS, _MIN_ROUNDS_SLOW = 25, 5, 2
_SLOW = 1.5
# On a GPU: rotations of the peers, and samples of each in one of them.
_GPU_ROUNDS, _GPU_REPEATS, _GPU_MIN_REPEATS = 3, 8, 3


@dataclass(frozen=True)
class Policy:
    """How long to measure.

    Attributes
    ----------
    seconds
        Clock time that one peer gets for one pass of one workload; the slowest get less. On a GPU
        it is at most 24 samples, each with a cold L2.
    sustained_seconds
        Back-to-back time of the mode "sustained"; 0 leaves the mode out.
    """

    seconds: float = 2.0
    sustained_seconds: float = 0.0


@dataclass
class Entry:
    """A peer while it is being measured."""

    peer: Peer
    prepared: Prepared
    call: Callable[[], object]
    rel_err: float
    rel_err_plain: float
    estimate_s: float = 0.0
    extra_bytes: int | None = None
    rounds: int = 0
    samples_s: list[float] = field(default_factory=list)
    readings: dict[str, Any] = field(default_factory=dict)


def measure(
    workload: Workload,
    dtype: DType,
    passes: Sequence[Pass],
    peers: Iterable[str],
    policy: Policy,
    what: str,
    seed: int = 0,
    device: str = "cpu",
    pool: Pool | None = None,
) -> Iterator[Row]:
    """Check and time every peer on a workload; each peer, pass and mode is one row without `run`.

    A peer that is absent, wrong or refuses the workload is a row whose `error` is the reason.

    Parameters
    ----------
    device
        "cpu" or "cuda".
    pool
        Samples of earlier measurements of the same, which rows take into account and add to.
    """
    case = Case.make(workload, dtype, seed, device)
    peers = list(peers)
    oracle: Oracle | None = None
    for pass_ in passes:
        checked: PassName = "forward" if pass_ == "forward" else "backward"
        if oracle is None or oracle.pass_ != checked:
            oracle = Oracle(case, checked)
        rows, entries = {}, []
        for name in peers:
            row = new_row(what, workload.name, name, "burst", workload.problem(checked, dtype))
            rows[name] = {**row, "pass": pass_}
            try:
                entry = _ready(PEERS[name], case, oracle, pass_)
            except Fa2tvmError as error:
                rows[name]["error"] = str(error)
                continue
            entries.append(entry)
        (_time_bursts if device == "cuda" else _time_interleaved)(entries, policy)
        for entry in entries:
            _fill(rows[entry.peer.name], entry, workload, pass_, pool)
        yield from rows.values()
        if policy.sustained_seconds:
            (_sustain_gpu if device == "cuda" else _time_sustained)(entries, policy)
            for entry in entries:
                row = {**rows[entry.peer.name], "mode": "sustained"}
                _fill(row, entry, workload, pass_, pool)
                yield row


def _ready(peer: Peer, case: Case, oracle: Oracle, pass_: Pass) -> Entry:
    """Prepare a peer, run it once, and compare that run with the oracle.

    Raises
    ------
    PeerUnavailable
        With the reason, where it cannot run here or its result is wrong.
    """
    device = case.q.device.type
    prepared = peer.prepare(case.workload.problem(oracle.pass_, case.dtype), device)
    with prepared.context():
        try:
            call = prepare_call(prepared, case, pass_)
            before = _begin_peak() if device == "cuda" else None
            results = call()
            _wait(device)
            extra_bytes = None if before is None else torch.cuda.max_memory_allocated() - before
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            first_line = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
            raise PeerUnavailable(f"it refuses this problem: {first_line}") from error
        start = time.perf_counter()
        call()
        _wait(device)
        estimate_s = time.perf_counter() - start
    rel_err, plain = oracle.errors(results)
    limit = YARDSTICK_OURS if peer.ours else YARDSTICK_PEERS
    if not rel_err <= limit * plain:
        raise PeerUnavailable(
            f"its result is wrong: relative error {rel_err:.1e}, over {limit:g} times the "
            f"{plain:.1e} of plain attention."
        )
    return Entry(peer, prepared, call, rel_err, plain, estimate_s, extra_bytes)


def _begin_peak() -> int:
    """Bytes that tensors of the current GPU take now, from where a peak is counted."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def prepare_call(prepared: Prepared, case: Case, pass_: Pass) -> Callable[[], Tensors]:
    """The one call that is checked and timed."""
    if pass_ == "forward":

        def forward() -> Tensors:
            with torch.no_grad():
                return (prepared.attention(case.q, case.k, case.v),)

        return forward
    inputs = [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]
    if pass_ == "both":

        def both() -> Tensors:
            return torch.autograd.grad(prepared.attention(*inputs), inputs, case.dout)

        return both
    out = prepared.attention(*inputs)

    def backward() -> Tensors:
        return torch.autograd.grad(out, inputs, case.dout, retain_graph=True)

    return backward


def _time_interleaved(entries: list[Entry], policy: Policy) -> None:
    """Time one call of each peer in turn, round after round; the order rotates by one a round."""
    if not entries:
        return
    fastest = min(entry.estimate_s for entry in entries)
    for entry in entries:
        least = _MIN_ROUNDS if entry.estimate_s <= _SLOW * fastest else _MIN_ROUNDS_SLOW
        affordable = int(policy.seconds / max(entry.estimate_s, 1e-9))
        entry.rounds = max(least, min(affordable, _MAX_ROUNDS))
        entry.samples_s = []
    for number in range(max(entry.rounds for entry in entries)):
        turn = number % len(entries)
        for entry in entries[turn:] + entries[:turn]:
            if number >= entry.rounds:
                continue
            time.sleep(_PAUSE_S)
            with entry.prepared.context():
                entry.prepared.prime()
                if entry.estimate_s < _WAKE_BELOW_S:
                    entry.call()
                start = time.perf_counter()
                entry.call()
                entry.samples_s.append(time.perf_counter() - start)


def _time_bursts(entries: list[Entry], policy: Policy) -> None:
    """On a GPU: a burst of each peer in turn; the order rotates by one a round."""
    clock = GpuClock(torch.device("cuda"))
    for entry in entries:
        entry.samples_s = []
    for number in range(_GPU_ROUNDS if entries else 0):
        turn = number % len(entries)
        for entry in entries[turn:] + entries[:turn]:
            affordable = int(policy.seconds / max(entry.estimate_s, 1e-9) / _GPU_ROUNDS)
            repeats = max(_GPU_MIN_REPEATS, min(affordable, _GPU_REPEATS))
            with entry.prepared.context():
                entry.prepared.prime()
                entry.samples_s += [us / 1e6 for us in clock.burst(entry.call, repeats)]


def _sustain_gpu(entries: list[Entry], policy: Policy) -> None:
    """On a GPU: calls back to back, with power and clock read meanwhile.

    Each peer gets two stretches, the second in reverse order: the board is warmer after a hot peer.
    """
    clock = GpuClock(torch.device("cuda"))
    for entry in entries:
        entry.samples_s = []
    readings: dict[str, list[dict[str, float | None]]] = defaultdict(list)
    for entry in (*entries, *reversed(entries)):
        with entry.prepared.context(), Meter() as meter:
            entry.prepared.prime()
            meter.start()
            times = clock.sustained(entry.call, policy.sustained_seconds / 2)
            readings[entry.peer.name].append(meter.stop())
        entry.samples_s += [us / 1e6 for us in times]
    for entry in entries:
        both = readings[entry.peer.name]
        for name in both[0]:
            values = [value for reading in both if (value := reading[name]) is not None]
            entry.readings[name] = round(sum(values) / len(values), 1) if values else None


def _time_sustained(entries: list[Entry], policy: Policy) -> None:
    """Time calls back to back, so that clocks and caches settle where they stay."""
    for entry in entries:
        entry.samples_s = []
        with entry.prepared.context():
            entry.prepared.prime()
            end = time.perf_counter() + policy.sustained_seconds
            while (start := time.perf_counter()) < end or len(entry.samples_s) < _MIN_ROUNDS_SLOW:
                entry.call()
                entry.samples_s.append(time.perf_counter() - start)


def _flops(workload: Workload, pass_: Pass) -> int:
    parts: tuple[PassName, ...] = ("forward", "backward") if pass_ == "both" else (pass_,)
    return sum(workload.problem(part, "float32").flops() for part in parts)


def _fill(
    row: Row, entry: Entry, workload: Workload, pass_: Pass, pool: Pool | None = None
) -> None:
    samples_s = entry.samples_s
    if pool is not None:
        key = (workload.name, row["dtype"], pass_, row["mode"], row["peer"])
        samples_s = pool.setdefault(key, [])
        samples_s += entry.samples_s
    p20, p50, p80 = (float(p) for p in np.percentile(samples_s, (20, 50, 80)))
    flops = _flops(workload, pass_)
    row.update(
        {
            "us_p20": round(1e6 * p20, 2),
            "us_p50": round(1e6 * p50, 2),
            "us_p80": round(1e6 * p80, 2),
            "samples": len(samples_s),
            "tflops": round(flops / p50 / 1e12, 6),
            "rel_err": entry.rel_err,
            "rel_err_plain": entry.rel_err_plain,
            "extra_bytes": entry.extra_bytes,
            **(entry.prepared.provenance or {}),
            **entry.readings,
        }
    )
