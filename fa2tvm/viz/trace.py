"""One trace of a pass: what the page plays and what the tests compare with reference.py.

Blocks come from blocks.py; `page/trace.js` repeats the same steps for settings changed in the page.
"""

from __future__ import annotations

from fa2tvm.problem import PassName
from fa2tvm.viz import trace_v1, trace_v2
from fa2tvm.viz.case import Case
from fa2tvm.viz.events import Event, Version
from fa2tvm.viz.setting import Setting

_ALGORITHMS = {
    ("forward", 1): trace_v1.forward,
    ("backward", 1): trace_v1.backward,
    ("forward", 2): trace_v2.forward,
    ("backward", 2): trace_v2.backward,
}


def trace(setting: Setting, pass_: PassName = "forward", version: Version = 2) -> list[Event]:
    """Every step of a pass of FlashAttention-1 or -2 on a setting."""
    return _ALGORITHMS[pass_, version](Case.of(setting))
