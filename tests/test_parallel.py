"""Threads: PyTorch's own pool, its settings, forks, and what happens without it."""

from __future__ import annotations

import os

import pytest
import torch
from calls import DTYPES, assert_same_bits, module, random_case, run
from python_process import run_python

from fa2tvm import parallel
from fa2tvm.problem import Variant

VARIANT = Variant("forward", "float32", 64, 64)
HEAD = """
import os, threading
import torch
import fa2tvm
from fa2tvm import parallel
def call(seq=257, batch=2, heads=3):
    generator = torch.Generator().manual_seed(seq)
    q, k, v = torch.randn(3, batch, seq, heads, 64, generator=generator).unbind()
    q.requires_grad_()
    out = fa2tvm.attention(q, k, v)
    out.sum().backward()
    return out.detach(), q.grad
def right(results, expected):
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results, expected))
expected = {seq: call(seq) for seq in (3, 64, 257)}
"""


def test_the_pool_is_that_of_torch() -> None:
    threads = parallel.find()
    assert threads.pool == "openmp"
    assert all(threads.addresses)
    assert parallel.count() == torch.get_num_threads()


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
def test_every_task_runs_once_on_any_number_of_threads(
    threads: int, generator: torch.Generator
) -> None:
    q = torch.randn(3, 257, 5, 64, generator=generator)
    results = []
    for n in (1, threads):
        out, lse = torch.full_like(q, torch.nan), torch.full((3, 5, 257), torch.nan)
        module(VARIANT).function_on(q, q, q, out, lse, 0.125, 0, n)
        results.append({"O": out, "LSE": lse})
    assert_same_bits(*results)


def test_results_do_not_depend_on_who_runs_a_task(generator: torch.Generator) -> None:
    """BUGS B10, B11: 20 runs on all threads are equal bit by bit, both passes."""
    case = random_case(generator, DTYPES[0], batch=2, seq_q=300, heads=4, heads_kv=2)
    first = run(case)
    for _ in range(20):
        assert_same_bits(run(case), first)


def test_affinity_and_thread_settings_are_left_alone() -> None:
    """BUGS G07 (TVM !4344): nothing is pinned, no pool is started, set_num_threads is obeyed."""
    run_python(
        HEAD
        + """
affinity = os.sched_getaffinity(0)
def threads(): return len(os.listdir("/proc/self/task"))
torch.randn(512, 512) @ torch.randn(512, 512)
torch.randn(1 << 20).exp()
started = threads()
for seq in (64, 257, 1024):
    call(seq)
assert threads() == started, (threads(), started)
assert all(os.sched_getaffinity(int(t)) == affinity for t in os.listdir("/proc/self/task"))
torch.set_num_threads(1)
assert parallel.count() == 1
assert right(call(), expected[257])
"""
    )
    run_python(
        HEAD
        + """
assert torch.get_num_threads() == 1
before = len(os.listdir("/proc/self/task"))
call(1024)
assert len(os.listdir("/proc/self/task")) <= before + 1  # autograd's own thread
""",
        env={"OMP_NUM_THREADS": "1"},
    )


def test_fewer_threads_than_asked_for() -> None:
    """The OpenMP runtime may give fewer; every task still runs."""
    run_python(
        HEAD + "torch.set_num_threads(8)\nassert right(call(), expected[257])\n",
        env={"OMP_THREAD_LIMIT": "2", "OMP_DYNAMIC": "true"},
    )


def test_forked_children_run_serially() -> None:
    """BUGS G06: OpenMP workers do not survive a fork, so a child must not wait for them.

    torch's own parallel operators hang there, hence set_num_threads(1) before comparing.
    """
    run_python(
        HEAD
        + """
torch.randn(1 << 22).exp()
pid = os.fork()
if pid == 0:
    q, k, v = torch.randn(3, 2, 257, 3, 64, generator=torch.Generator().manual_seed(257))
    with torch.no_grad():
        attention = fa2tvm.attention(q, k, v)
    problem = fa2tvm.Problem(
        fa2tvm.Variant("forward", "float32", 64, 64), fa2tvm.Shape(2, 3, 3, 257, 257)
    )
    out, lse = torch.empty_like(q), torch.empty(2, 3, 257)
    fa2tvm.module_for(problem).function(q, k, v, out, lse, 0.125, 0)
    torch.set_num_threads(1)
    ok = torch.allclose(attention, expected[257][0], atol=1e-5) and out.equal(attention)
    os._exit(0 if ok and parallel.count() == 1 else 1)
assert os.waitpid(pid, 0)[1] == 0
assert right(call(), expected[257])
"""
    )


def test_eight_threads_start_cold_together(tmp_path: os.PathLike[str]) -> None:
    """BUGS G04: 8 Python threads, 50 calls each, mixed shapes, nothing compiled or loaded yet."""
    run_python(
        HEAD.replace("expected = {seq: call(seq) for seq in (3, 64, 257)}", "")
        + """
start = threading.Barrier(8)
seen, failures = {}, []
def work(number):
    try:
        start.wait()
        for i in range(50):
            seq = (3, 64, 257, 100, 1)[(number + i) % 5]
            results = call(seq)
            if not right(results, seen.setdefault(seq, results)):
                failures.append((number, i, seq))
    except BaseException as error:
        failures.append((number, repr(error)))
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert not failures, failures[:3]
assert all(right(call(seq), results) for seq, results in seen.items())
""",
        env={"FA2TVM_HOME": os.fspath(tmp_path)},
    )


@pytest.mark.parametrize("runtime", ["tvm", "serial"])
def test_without_an_openmp_runtime(runtime: str) -> None:
    """TVM's pool where its library is installed, unpinned; one thread where not even that."""
    without_openmp = "import fa2tvm.parallel as p\np._openmp = lambda: None\n"
    without_tvm = "p._start_tvm_pool = lambda: False\n" if runtime == "serial" else ""
    run_python(
        without_openmp
        + without_tvm
        + HEAD
        + f"""
assert parallel.find().pool == {runtime!r}
generator = torch.Generator().manual_seed(257)
q, k, v = torch.randn(3, 2, 257, 3, 64, generator=generator).double().transpose(2, 3)
out = (q @ k.mT / 8).softmax(-1) @ v
assert torch.allclose(expected[257][0].double(), out.transpose(1, 2), atol=1e-5)
assert all(os.sched_getaffinity(int(t)) == os.sched_getaffinity(0)
           for t in os.listdir("/proc/self/task"))
"""
    )
