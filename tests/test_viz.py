"""The visualizer's trace: every number is reference.py's, every block is blocks.py's."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from fa2tvm import reference
from fa2tvm.blocks import key_blocks, query_blocks
from fa2tvm.errors import UnsupportedProblem
from fa2tvm.viz.events import Event, final
from fa2tvm.viz.setting import MASKS, MAX_LENGTH, Setting, inputs
from fa2tvm.viz.trace import trace

SETTINGS = {
    "example": Setting(),
    "tails": Setting(5, 7, 2, 2, 3, "bottom_right", None, 11),
    "blind rows": Setting(7, 4, 4, 3, 2, "bottom_right", 0.8, 5),
    "top left": Setting(6, 9, 3, 4, 2, "top_left", -0.5, 8),
    "one block": Setting(3, 3, 1, 8, 8, "top_left", 0.0, 2),
    "single rows": Setting(3, 4, 2, 1, 1, "full", None, 9),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)

# Values of the trace by op, and the local variables of reference.py that they must equal when the
# statement that makes them has run.
FORWARD = {
    "load_q": {"Q_i": "Q_i"},
    "init": {"O_i": "O_i", "l_i": "l_i", "m_i": "m_i"},
    "load_kv": {"K_j": "K_j", "V_j": "V_j"},
    "scores": {"S_ij": "S_ij"},
    "mask": {"S_ij": "S_ij"},
    "row_max": {"m_i": "m_new", "m_old": "m_i"},
    "probabilities": {"P_ij": "P_ij"},
    "rescale": {"rescale": "rescale"},
    "row_sum": {"l_i": "l_i"},
    "accumulate": {"O_i": "O_i"},
}
BACKWARD = {
    "delta": {"D": "D"},
    "load_kv": {"K_j": "K_j", "V_j": "V_j"},
    "init": {"dK_j": "dK_j", "dV_j": "dV_j"},
    "load_q": {"Q_i": "Q_i", "dO_i": "dO_i", "L_i": "L_i", "D_i": "D_i"},
    "scores": {"S_ij": "S_ij"},
    "mask": {"S_ij": "S_ij"},
    "probabilities": {"P_ij": "P_ij"},
    "dv": {"dV_j": "dV_j"},
    "dp": {"dP_ij": "dP_ij"},
    "ds": {"dS_ij": "dS_ij"},
    "dq": {"dQ": "dQ"},
    "dk": {"dK_j": "dK_j"},
    "store": {"dK": "dK", "dV": "dV"},
}


def locals_after_each_line(
    code: CodeType, call: Callable[[], Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """What `call` returns, and a copy of the local variables of `code` at each of its lines."""
    seen: list[dict[str, Any]] = []

    def in_frame(frame: FrameType, _event: str, _arg: object) -> Any:
        seen.append(
            {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in frame.f_locals.items()}
        )
        return in_frame

    def on_call(frame: FrameType, _event: str, _arg: object) -> Any:
        return in_frame if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result, seen


def run_reference(setting: Setting, pass_: str) -> tuple[Any, list[dict[str, Any]]]:
    """Algorithm 1 or 2 of reference.py, with its variables at every line."""
    x = inputs(setting)
    blocks = (setting.block_q, setting.block_kv, setting.scale)
    mask = (setting.causal, setting.causal_offset)
    O, L = reference.algorithm_1(x["Q"], x["K"], x["V"], *blocks, *mask)
    if pass_ == "forward":
        args = (x["Q"], x["K"], x["V"], *blocks, *mask)
        return locals_after_each_line(
            reference.algorithm_1.__code__, lambda: reference.algorithm_1(*args)
        )
    args = (x["Q"], x["K"], x["V"], O, x["dO"], L, *blocks, *mask)
    return locals_after_each_line(
        reference.algorithm_2.__code__, lambda: reference.algorithm_2(*args)
    )


def holds(
    state: dict[str, Any], event: Event, names: dict[str, str], tolerance: float = 1e-12
) -> bool:
    """Whether the variables of reference.py are at this event."""
    for key, block in (("i", event.i), ("j", event.j)):
        if block is not None and state.get(key) != block:
            return False
    for ours, theirs in names.items():
        want = state.get(theirs)
        got = event.values[ours]
        if want is None or np.shape(want) != np.shape(got):
            return False
        if not np.allclose(want, got, rtol=0, atol=tolerance, equal_nan=True):
            return False
    return True


@every_setting
@pytest.mark.parametrize(("pass_", "table"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_every_step_is_a_step_of_reference(
    setting: Setting, pass_: Any, table: dict[str, dict[str, str]]
) -> None:
    """The events are found among reference.py's own variables, in the same order."""
    _, states = run_reference(setting, pass_)
    place, found = 0, set()
    for event in trace(setting, pass_):
        if event.op not in table:
            assert event.op in {"start", "skip", "divide", "lse", "store", "end"}
            continue
        ahead = range(place, len(states))
        hit = next((k for k in ahead if holds(states[k], event, table[event.op])), None)
        assert hit is not None, f"{event.op} of block {event.i}, {event.j} is not in reference.py"
        place = hit
        found.add(event.op)
    assert found >= set(table) - {"mask"}


@every_setting
@pytest.mark.parametrize("version", [1, 2])
def test_results_are_those_of_reference(setting: Setting, version: Any) -> None:
    (O, L), _ = run_reference(setting, "forward")
    gradients, _ = run_reference(setting, "backward")
    ends = final(trace(setting, "forward", version))
    np.testing.assert_allclose(ends["O"], O, rtol=0, atol=1e-12)
    if version == 2:
        np.testing.assert_allclose(ends["L"], L, rtol=0, atol=1e-12)
    else:
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(ends["m"] + np.log(ends["l"]), L, rtol=0, atol=1e-12)
    ends = final(trace(setting, "backward", version))
    for name, want in zip(("dQ", "dK", "dV"), gradients, strict=True):
        np.testing.assert_allclose(ends[name], want, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("version", [1, 2])
def test_blocks_are_those_of_blocks_py(mask: Any, pass_: Any, version: Any) -> None:
    """Visited, masked and skipped blocks, and their order, over many shapes."""
    for seq_q, seq_kv, block_q, block_kv in itertools.product((1, 4, 7), (1, 5, 8), (1, 3), (2, 4)):
        setting = Setting(seq_q, seq_kv, 1, block_q, block_kv, mask)
        events = trace(setting, pass_, version)
        geometry = (block_q, block_kv, seq_q, seq_kv, setting.causal, setting.causal_offset)
        by_rows = pass_ == "forward" and version == 2
        ranges, n_outer = (
            (key_blocks, -(-seq_q // block_q))
            if by_rows
            else (query_blocks, -(-seq_kv // block_kv))
        )
        want, masked = [], []
        for outer in range(n_outer):
            seen = ranges(outer, *geometry)
            for inner in range(seen.start, seen.end):
                block = (outer, inner) if by_rows else (inner, outer)
                want.append(block)
                if not seen.full_start <= inner < seen.full_end:
                    masked.append(block)
        assert [(e.i, e.j) for e in events if e.op == "scores"] == want
        assert [(e.i, e.j) for e in events if e.op == "mask"] == masked
        skipped = sum(len(e.values["skipped"]) for e in events if e.op == "skip")
        assert skipped + len(want) == -(-seq_q // block_q) * -(-seq_kv // block_kv)


def test_the_example_shows_rows_raised_and_unchanged() -> None:
    raised = [e.values["raised"].tolist() for e in trace(Setting()) if e.op == "row_max" and e.j]
    assert raised == [[False, True], [True, False]]


def test_counts_of_the_example() -> None:
    """N = 4, d = 3, B = 2 by hand: what version 2 saves over version 1."""
    events = trace(Setting())
    n, d, blocks = 4, 3, 4
    assert sum(e.matmul_flops for e in events) == 2 * 2 * n * n * d
    # Scale, compare, subtract, exp, add on each logit; 3 a row and step, d a row and step to
    # rescale; d + 2 a row at the end.
    per_logit, steps_of_a_row = 5, 2
    want = per_logit * n * n + steps_of_a_row * n * (3 + d) + n * (d + 2)
    assert sum(e.other_flops for e in events) == want
    old = trace(Setting(), version=1)
    assert sum(e.other_flops for e in old) == per_logit * n * n + steps_of_a_row * n * (9 + 4 * d)
    assert sum(e.matmul_flops for e in old) == sum(e.matmul_flops for e in events)
    # Q and O once, K and V once for each query block, L once.
    read = 2 * (n * d + 2 * 2 * n * d)
    assert sum(e.read_bytes for e in events) == read
    assert sum(e.written_bytes for e in events) == 2 * n * d + 4 * n
    assert sum(e.read_bytes for e in old) == 2 * (2 * n * d) + blocks * (2 * 2 * 2 * d + 2 * 4 * 2)


@every_setting
def test_what_is_on_chip_is_known(setting: Setting) -> None:
    """A name in shared memory or registers has a value, and nothing is left at the end."""
    for pass_, version in itertools.product(("forward", "backward"), (1, 2)):
        events = trace(setting, pass_, version)  # type: ignore[arg-type]
        state: dict[str, Any] = {}
        for event in events:
            state.update(event.values)
            assert set(event.shared) | set(event.registers) <= set(state), event.op
        assert not events[-1].shared
        assert not events[-1].registers


def test_events_are_json() -> None:
    setting = SETTINGS["blind rows"]
    text = json.dumps([e.to_dict() for e in trace(setting)], allow_nan=False)
    ends = json.loads(text)[-2]["values"]
    assert ends["L"][:3] == ["-inf"] * 3
    assert ends["O"][0] == [0.0] * 4


@pytest.mark.parametrize("wrong", [{"seq_q": 0}, {"seq_kv": MAX_LENGTH + 1}, {"mask": "band"}])
def test_a_setting_that_the_page_cannot_show_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedProblem, match=next(iter(wrong))):
        Setting(**wrong)
