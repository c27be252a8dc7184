"""The tuner and the benchmark on a real GPU: faults stay in their worker, peers are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fa2tvm.bench.clock import GpuClock
from fa2tvm.bench.gpu import Meter
from fa2tvm.bench.measure import Policy, measure
from fa2tvm.tune.worker import Worker, WorkerFailure, WorkerSpec
from fa2tvm.workloads import parse

pytestmark = pytest.mark.gpu


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(WorkerSpec("gpu_fault_role", tmp_path))
    yield worker
    worker.close()


def test_a_faulting_kernel_ends_its_worker_only(worker: Worker, tmp_path: Path) -> None:
    """BUGS I12 (TVM #13639): a faulting candidate killed the tuner; here the next one is served."""
    add = {"do": "add", "device": "cuda"}
    assert worker.call(add, 60) == {"us": 4.0}
    absent = {"do": "check", "path": str(tmp_path / "absent"), "device": "cuda", "seed": 0}
    assert "no complete module" in worker.call(absent, 60)["reason"]
    assert worker.call(add, 60) == {"us": 4.0}
    with pytest.raises(WorkerFailure, match=r"exit status 77.*CUDA error"):
        worker.call(absent | {"fault": True}, 60)
    assert worker.call(add, 60) == {"us": 4.0}
    assert float(torch.ones(3, device="cuda").sum()) == 3


@pytest.mark.parametrize("causal", ["", "_causal"])
@pytest.mark.parametrize("passes", [("forward",), ("backward", "both")])
def test_peers_are_right_and_timed(causal: str, passes: Any) -> None:
    workload = parse(f"d64{causal}_b2_h4k2_q512")
    peers = ["sdpa-flash", "sdpa-cudnn", "flash-attn-4"]
    policy = Policy(seconds=0.01, sustained_seconds=0.2)
    rows = list(measure(workload, "bfloat16", passes, peers, policy, "test", device="cuda"))
    timed = [row for row in rows if row["error"] is None]
    assert {(r["peer"], r["mode"]) for r in timed} >= {
        (peer, mode) for peer in peers[:2] for mode in ("burst", "sustained")
    }
    for row in timed:
        assert 0 < row["us_p20"] <= row["us_p50"] <= row["us_p80"]
        assert 0 < row["rel_err"] < 2e-2
        if row["mode"] == "sustained":
            assert row["power_w"] > 10
            assert row["clock_mhz"] > 100


def test_the_meter_reads() -> None:
    with Meter() as meter:
        assert meter.driver()
        assert (meter.power_limit_w() or 0) > 50
        meter.start()
        GpuClock(torch.device("cuda")).sustained(lambda: torch.ones(1 << 20, device="cuda"), 0.2)
        assert set(meter.stop()) == {"power_w", "clock_mhz"}
