"""Processes and threads: forks, spawns, data loaders, exits, imports.

The rows named are of BUGS.md, sections G and J; tests/test_parallel.py has those on threads alone.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from python_process import PATIENCE_S, ROOT, run_python

LOADERS = """
import os
import torch
import fa2tvm

def attend(seq):
    generator = torch.Generator().manual_seed(seq)
    q, k, v = torch.randn(3, 2, seq, 3, 64, generator=generator)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fa2tvm.attention(*leaves, causal=True)
    out.sum().backward()
    return torch.stack([out.detach(), *(x.grad for x in leaves)])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        assert os.getpid() != PARENT
        return attend(100 + 40 * index)

PARENT = int(os.environ.setdefault("TEST_PARENT", str(os.getpid())))

if __name__ == "__main__":
    expected = [attend(100 + 40 * index) for index in range(6)]
    for how in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=None, num_workers=2, multiprocessing_context=how, timeout=200
        )
        for ours, wanted in zip(loader, expected, strict=True):
            assert torch.allclose(ours, wanted, atol=1e-5)
        assert torch.allclose(attend(100), expected[0], atol=1e-5)
"""


def test_data_loaders_of_both_kinds(tmp_path: Path) -> None:
    """G06 (PT #40403): workers that are forked after use, or spawned, call attention and train."""
    script = tmp_path / "loaders.py"
    script.write_text(LOADERS)
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    done = subprocess.run(
        [sys.executable, os.fspath(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_fork_while_other_threads_choose_and_call() -> None:
    """G06: locks that another thread held at the fork do not exist in the child."""
    run_python(
        """
import os, threading, time
import torch
import fa2tvm
from fa2tvm import modules
q = torch.randn(1, 33, 2, 64)
expected = fa2tvm.attention(q, q, q)
stop = False
def busy():
    while not stop:
        modules.forget()
        fa2tvm.attention(q, q, q)
threads = [threading.Thread(target=busy) for _ in range(3)]
for t in threads: t.start()
held = threading.Thread(target=lambda: modules._lock.acquire() and time.sleep(3))
for round in range(12):
    if round == 11:
        held.start()
        time.sleep(0.2)
    pid = os.fork()
    if pid == 0:
        ok = fa2tvm.attention(q, q, q).allclose(expected, atol=1e-6)
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if fa2tvm.attention(q, q, q).allclose(expected, atol=1e-6) else 1)
        os._exit(0 if ok and os.waitpid(grandchild, 0)[1] == 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0
os._exit(0)
"""
    )


def test_the_end_of_a_process_is_clean() -> None:
    """J07 (TVM #18316): exit code 0 after threads that are still calling, and calls at exit.

    Daemon threads are another matter: within any operator of PyTorch they abort the exit.
    """
    run_python(
        """
import atexit, sys, threading
import torch
import fa2tvm
q = torch.randn(1, 300, 4, 64, requires_grad=True)
def call():
    for _ in range(20):
        fa2tvm.attention(q, q, q).sum().backward()
atexit.register(call)
for _ in range(3):
    threading.Thread(target=call).start()
sys.exit(0)
"""
    )


def test_an_interrupt_within_a_call_leaves_the_next_one_right() -> None:
    """G04: an interrupt (Ctrl-C) between calls or within one is a KeyboardInterrupt, no more.

    The kernel's timer sends it, not a threading.Timer: an interrupt that arrives while a thread's
    object is freed is swallowed by the callbacks of its weak references. Whatever else may swallow
    one, the timer sends the next half a second later.
    """
    run_python(
        """
import signal, time
import torch
import fa2tvm
signal.signal(signal.SIGALRM, signal.default_int_handler)
q = torch.randn(1, 300, 4, 64)
expected = fa2tvm.attention(q, q, q)
start = time.perf_counter()
fa2tvm.attention(q, q, q)
call_s = time.perf_counter() - start
for n in range(100):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + n / 50 * call_s, 0.5)
        while True:
            fa2tvm.attention(q, q, q)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert fa2tvm.attention(q, q, q).equal(expected), n
"""
    )


def test_tvm_s_own_setting_of_threads() -> None:
    """G07 (TVM !4344): where TVM's pool must do, TVM_NUM_THREADS is its size, pinned to nothing."""
    run_python(
        """
import os
import fa2tvm.parallel as p
p._openmp = lambda: None
import torch
import fa2tvm
torch.randn(1 << 20).exp()
affinity = os.sched_getaffinity(0)
before = len(os.listdir("/proc/self/task"))
q = torch.randn(2, 600, 4, 64)
fa2tvm.attention(q, q, q)
assert p.find().pool == "tvm"
assert len(os.listdir("/proc/self/task")) == before
assert all(os.sched_getaffinity(int(t)) == affinity for t in os.listdir("/proc/self/task"))
""",
        env={"TVM_NUM_THREADS": "1"},
    )


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize("order", ["transformers, fa2tvm", "fa2tvm, transformers"])
def test_imports_beside_transformers(order: str) -> None:
    """J07 (TVM #18651): up to a clean exit."""
    run_python(
        f"import {order}\n"
        "import torch\n"
        "q = torch.randn(1, 300, 2, 64, requires_grad=True)\n"
        "fa2tvm.attention(q, q, q).sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
    )


def test_stale_locks_of_others_are_not_waited_for(tmp_path: Path) -> None:
    """J05 (FI #972): lock files that a killed process left, ours and those of extensions."""
    for name in ("fa2tvm", "cache/tvm-ffi", "cache/torch_extensions", "torch_extensions/any"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for lock in ("lock", ".lock", "cache.lock", "addon.lock"):
            (tmp_path / name / lock).write_text("1")
    run_python(
        """
import os, shutil
import torch
import fa2tvm
q = torch.randn(1, 30, 2, 64)
assert fa2tvm.attention(q, q, q).isfinite().all()
""",
        env={
            "HOME": os.fspath(tmp_path),
            "XDG_CACHE_HOME": os.fspath(tmp_path / "cache"),
            "TVM_FFI_CACHE_DIR": os.fspath(tmp_path / "cache" / "tvm-ffi"),
            "TORCH_EXTENSIONS_DIR": os.fspath(tmp_path / "torch_extensions"),
        },
    )
