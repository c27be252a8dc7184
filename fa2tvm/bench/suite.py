"""What `fa2tvm bench` runs: the speed table, the cost against length, the cost of a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fa2tvm.bench.calls import measure_calls
from fa2tvm.bench.measure import Pass, Policy, measure
from fa2tvm.bench.memory import extra_memory
from fa2tvm.bench.peers import PEERS
from fa2tvm.bench.rows import Row
from fa2tvm.errors import PeerUnavailable
from fa2tvm.problem import DType, PassName, Problem
from fa2tvm.workloads import Workload, tagged

Cell = tuple[Workload, DType, tuple[Pass, ...]]

# The speed table; half precision is for inference.
_PASSES_OF_DTYPE: dict[DType, tuple[PassName, ...]] = {
    "float32": ("forward", "backward"),
    "float16": ("forward",),
    "bfloat16": ("forward",),
}
_SCALING_PEERS = ("fa2tvm", "sdpa-flash")


def known_peers(names: Iterable[str], kind: str = "cpu") -> list[str]:
    """The names; where there are none, all peers of a kind of device, "cpu" or "cuda".

    Raises
    ------
    PeerUnavailable
        For a name that is no peer there.
    """
    known = [name for name, peer in PEERS.items() if kind in peer.kinds]
    names = list(names) or known
    for name in names:
        if name not in known:
            raise PeerUnavailable(
                f"peer is {name!r}, but only {', '.join(known)} exist on {kind}; choose one."
            )
    return names


def speed_table() -> list[Cell]:
    """The cells of the CPU's speed table: every dtype on the problems tagged "cpu"."""
    return [
        (workload, dtype, passes)
        for dtype, passes in _PASSES_OF_DTYPE.items()
        for workload in tagged("cpu")
    ]


def gpu_table(passes: Sequence[Pass]) -> list[Cell]:
    """The cells of the GPU's speed table, in bfloat16."""
    return [(workload, "bfloat16", tuple(passes)) for workload in tagged("gpu")]


def cells_of(problems: Iterable[Problem]) -> list[Cell]:
    """Problems that differ in nothing but their pass, together."""
    passes: dict[tuple[Workload, DType], list[Pass]] = {}
    for problem in problems:
        v = problem.variant
        name = problem.name.removeprefix(f"{v.pass_}_{v.dtype}_")
        workload = Workload(
            name, problem.shape, v.head_dim_qk, v.head_dim_v, v.causal, problem.alignment
        )
        passes.setdefault((workload, v.dtype), []).append(v.pass_)
    return [(workload, dtype, tuple(p)) for (workload, dtype), p in passes.items()]


def speed(
    cells: Iterable[Cell],
    peers: Sequence[str],
    policy: Policy,
    what: str,
    run: dict[str, Any],
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[Row]:
    """Every peer on every workload; rows come as they are measured."""
    for workload, dtype, passes in cells:
        for row in measure(workload, dtype, passes, peers, policy, what, seed, device):
            yield {**row, "run": run}


def scaling(policy: Policy, run: dict[str, Any], seed: int = 0) -> Iterator[Row]:
    """Time and extra memory from short to long sequences, float32, forward and backward."""
    for workload in tagged("scaling"):
        for row in measure(
            workload, "float32", ("forward", "backward"), _SCALING_PEERS, policy, "scaling", seed
        ):
            if row["error"] is None:
                try:
                    row["extra_bytes"], row["output_bytes"] = extra_memory(
                        workload, "float32", row["pass"], row["peer"]
                    )
                except PeerUnavailable as error:
                    row["error"] = str(error)
            yield {**row, "run": run}


def calls(run: dict[str, Any], seed: int = 0, device: str = "cpu") -> Iterator[Row]:
    """CPU time of one tiny call."""
    for workload in tagged("tiny"):
        for row in measure_calls(workload, seed, device):
            yield {**row, "run": run}
