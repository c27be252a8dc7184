"""Peak memory of one call beyond its inputs, in a process of its own.

Run as `python -m fa2tvm.bench.memory WORKLOAD DTYPE PASS PEER THREADS`; prints one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from fa2tvm.bench.check import Case
from fa2tvm.bench.measure import prepare_call
from fa2tvm.bench.peers import PEERS
from fa2tvm.errors import PeerUnavailable
from fa2tvm.problem import DType, PassName
from fa2tvm.workloads import Workload, named

_WARM_UP_SEQ = 64
_TIMEOUT_S = 300


def extra_memory(workload: Workload, dtype: DType, pass_: PassName, peer: str) -> tuple[int, int]:
    """Bytes by which resident memory peaks during one call, and those of its results among them.

    Raises
    ------
    PeerUnavailable
        Where the system cannot tell, or the call fails.
    """
    command = [sys.executable, "-m", "fa2tvm.bench.memory", workload.name, dtype, pass_, peer]
    # Freed blocks of this size go back to the system at once, so that none is reused unseen.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    try:
        done = subprocess.run(
            [*command, str(torch.get_num_threads())],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"its memory took over {_TIMEOUT_S} s to measure.") from None
    if done.returncode != 0:
        last_line = (done.stderr.strip() or "no message").splitlines()[-1]
        raise PeerUnavailable(f"its memory cannot be measured: {last_line}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["extra_bytes"], answer["output_bytes"]


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise PeerUnavailable(f"this system does not report {field}.")
    return int(match[1]) << 10


def _reset_high_water_mark() -> None:
    """Set VmHWM to the present VmRSS. Source: proc(5), /proc/[pid]/clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def main(name: str, dtype: DType, pass_: PassName, peer: str, threads: str) -> None:
    """Measure in this process."""
    torch.set_num_threads(int(threads))
    workload = named(name)
    small = replace(
        workload, shape=replace(workload.shape, seq_q=_WARM_UP_SEQ, seq_kv=_WARM_UP_SEQ)
    )
    for warm_up in (True, False):
        size = small if warm_up else workload
        prepared = PEERS[peer].prepare(size.problem(pass_, dtype), "cpu")
        with prepared.context():
            call = prepare_call(prepared, Case.make(size, dtype, seed=0), pass_)
            _reset_high_water_mark()
            before = _status_bytes("VmRSS")
            results = call()
            peak = _status_bytes("VmHWM")
    output_bytes = sum(x.untyped_storage().nbytes() for x in results)
    print(json.dumps({"extra_bytes": peak - before, "output_bytes": output_bytes}))  # noqa: T201 - the answer to the parent


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
