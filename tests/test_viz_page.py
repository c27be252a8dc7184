"""The visualizer's page in a browser: its numbers, keys and words, and how it fits a screen."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from browser import Browser, browser, why_absent
from test_viz import BACKWARD, FORWARD, SETTINGS, holds, run_reference

from fa2tvm.viz.events import Event
from fa2tvm.viz.render import page, write_page
from fa2tvm.viz.setting import Setting
from fa2tvm.viz.trace import trace

needs_browser = pytest.mark.skipif(why_absent() is not None, reason=str(why_absent()))
# The page shows a number to three digits and carries it whole in `data-value`.
NUMBERS = """
return [...document.querySelectorAll('.mat:not(.ghost)')].map(table => [table.dataset.name,
  [...table.rows].map(row => [...row.cells].filter(c => c.dataset.value || c.className == 'blank')
    .map(c => c.dataset.value ?? null)).filter(row => row.length)])
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(tmp_path_factory.mktemp("page") / "viz.html").as_uri()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.resize(1280, 900)
        yield opened


@pytest.fixture
def quiet(window: Browser) -> Iterator[Browser]:
    """A window in which nothing may complain."""
    yield window
    assert not window.messages()


def fragment(setting: Setting, **more: Any) -> str:
    values = setting.to_dict() | more
    if setting.softmax_scale is None:
        values["softmax_scale"] = "auto"
    return "#" + urlencode(values)


def number(text: str | None) -> float:
    return math.nan if text is None else float(text)


def states(setting: Setting, events: list[Event]) -> Iterator[tuple[Event, dict[str, Any]]]:
    from fa2tvm.viz.setting import inputs

    state: dict[str, Any] = dict(inputs(setting))
    for event in events:
        state.update(event.values)
        yield event, dict(state)


def flat(value: Any) -> list[float]:
    rows = value if isinstance(value, list) else value.tolist()
    return [x for row in rows for x in (row if isinstance(row, list) else [row])]


@needs_browser
@pytest.mark.parametrize("name", ["example", "tails", "blind rows"])
@pytest.mark.parametrize(("pass_", "table"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_every_step_shows_the_numbers_of_reference(
    quiet: Browser, address: str, name: str, pass_: Any, table: dict[str, dict[str, str]]
) -> None:
    """From the first step to the last: what is computed is found among reference.py's variables,
    in its order, and all else that is on show is the trace's, which test_viz ties to reference.py.
    """
    setting = SETTINGS[name]
    quiet.open(address + fragment(setting, version=2, **{"pass": pass_}))
    events = trace(setting, pass_)
    _, theirs = run_reference(setting, pass_)
    place = 0
    for t, (event, state) in enumerate(states(setting, events)):
        where = quiet.run("return document.getElementById('where').textContent")
        assert f"{t + 1}/{len(events)}" in where
        assert f"{event.line}" in where
        shown = {
            matrix: np.array([number(x) for row in rows for x in row])
            for matrix, rows in quiet.run(NUMBERS)
        }
        assert set(event.shared) | set(event.registers) <= set(shown)
        for matrix, got in shown.items():
            want = np.array(flat(state[matrix]))
            assert got.shape == want.shape, (t, matrix)
            assert np.allclose(got, want, rtol=0, atol=1e-6, equal_nan=True), (t, matrix)
        if event.op in table:
            names = table[event.op]
            values = {ours: shown[ours].reshape(np.shape(event.values[ours])) for ours in names}
            on_page = replace(event, values=values)
            ahead = range(place, len(theirs))
            hit = next((k for k in ahead if holds(theirs[k], on_page, names, 1e-6)), None)
            assert hit is not None, f"step {t}: {event.op} is not in reference.py"
            place = hit
        quiet.press("ArrowRight")


@needs_browser
@pytest.mark.parametrize("name", ["example", "tails", "blind rows"])
def test_the_last_step_shows_the_results_of_reference(
    quiet: Browser, address: str, name: str
) -> None:
    setting = SETTINGS[name]
    (O, L), _ = run_reference(setting, "forward")
    gradients, _ = run_reference(setting, "backward")
    want = {"O": O, "L": L, **dict(zip(("dQ", "dK", "dV"), gradients, strict=True))}
    for pass_, names in (("forward", ("O", "L")), ("backward", ("dQ", "dK", "dV"))):
        quiet.open(address + fragment(setting, **{"pass": pass_}))
        quiet.press("End")
        shown = dict(quiet.run(NUMBERS))
        for matrix in names:
            got = [number(x) for row in shown[matrix] for x in row]
            assert got == pytest.approx(flat(want[matrix]), abs=1e-6), matrix


@needs_browser
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("version", [1, 2])
def test_events_made_in_the_page_are_those_of_python(
    quiet: Browser, address: str, pass_: Any, version: Any
) -> None:
    quiet.open(address)
    for setting in SETTINGS.values():
        script = "return plainEvents(traceOf(...arguments))"
        theirs = quiet.run(script, setting.to_dict(), pass_, version)
        ours = [event.to_dict() for event in trace(setting, pass_, version)]
        assert same(ours, theirs), setting


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, (int, float)) and abs(a - b) < 1e-9
    return bool(a == b)


@needs_browser
def test_rows_raised_and_unchanged_are_told_apart(quiet: Browser, address: str) -> None:
    setting = Setting()
    step = next(t for t, e in enumerate(trace(setting)) if e.op == "row_max" and e.j)
    quiet.open(address + fragment(setting, step=step, lang="en"))
    rows = quiet.run(
        "return [...document.querySelectorAll('[data-name=m_i] tr')].map(r => r.innerText)"
    )
    assert "unchanged" in rows[0]
    assert "raised" in rows[1]
    assert "unchanged" in quiet.run("return document.getElementById('say').textContent")


@needs_browser
def test_keyboard(quiet: Browser, address: str) -> None:
    quiet.open(address + "#lang=en")
    at = "return player.at"
    quiet.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert quiet.run(at) == 1
    quiet.press("End")
    assert quiet.run("return player.at === player.events.length - 1")
    quiet.press("Home", "+", "+", "+", " ")
    assert quiet.run("return player.timer !== null && player.speed === 8")
    quiet.press(" ")
    assert quiet.run("return player.timer === null")
    quiet.press("p", "v")
    assert quiet.run("return [player.pass, player.version]") == ["backward", 1]
    assert quiet.run("return location.hash").count("backward") == 1


@needs_browser
def test_play_moves_and_stops_at_the_end(quiet: Browser, address: str) -> None:
    quiet.open(address + "#step=37")
    quiet.run("player.speed = 200")
    quiet.click("#play")
    for _ in range(100):
        if quiet.run("return player.timer === null"):
            break
    assert quiet.run("return [player.timer, player.at === player.events.length - 1]") == [
        None,
        True,
    ]


@needs_browser
def test_language_switch_leaves_no_word_behind(quiet: Browser, address: str) -> None:
    quiet.open(address + "#lang=en&mask=bottom_right&step=12")
    quiet.press("l")
    assert quiet.run("return document.documentElement.lang") == "zh"
    text = quiet.run("return document.body.innerText")
    assert "寄存器" in text
    english = set(re.findall(r"[A-Za-z]{4,}", text))
    names = {"English", "FlashAttention", "FLOPs", "split", "warp", "rowmax", "rowsum", "scale"}
    assert english <= names | {
        "diag",
        "emold",
        "miold",
        "viz",
        "trace",
        "fa2tvm",
        "reference",
        "Home",
    }
    quiet.press("l")
    text = quiet.run("return document.body.innerText.replaceAll('中文', '')")
    assert not re.search(r"[\u4e00-\u9fff]", text)


@needs_browser
def test_setting_can_be_changed_and_shared(quiet: Browser, address: str) -> None:
    quiet.open(address)
    quiet.run("""
      const form = document.getElementById("setting");
      form.seq_q.value = 99; form.mask.value = "top_left"; form.softmax_scale.value = "0.25";
      form.dispatchEvent(new Event("change", {bubbles: true}));
    """)
    link = quiet.run("return location.href")
    quiet.open(link)
    setting = quiet.run("return player.setting")
    assert (setting["seq_q"], setting["mask"], setting["softmax_scale"]) == (32, "top_left", 0.25)
    # Of 16 x 2 blocks only that of rows 0 and 1 with keys 2 and 3 sees nothing.
    assert quiet.run("return document.querySelectorAll('#grid .skipped').length") == 1
    quiet.click("#reset")
    assert quiet.run("return player.setting") == Setting().to_dict()


@needs_browser
def test_the_page_checks_itself(quiet: Browser, address: str) -> None:
    quiet.open(address + "#lang=en")
    checked = quiet.run("return document.getElementById('checked').innerText")
    assert float(checked.rsplit(maxsplit=1)[1]) < 1e-12


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen(window: Browser, address: str, width: int, scheme: str) -> None:
    """Nothing sticks out sideways, text stands out from its ground, and everything has a name.

    FA2TVM_SCREENSHOTS names a folder for the pictures.
    """
    window.resize(width, 844, mobile=width < 600)
    window.prefer(scheme)
    setting = Setting(seq_q=6, seq_kv=6, mask="bottom_right")
    for pass_ in ("forward", "backward"):
        window.open(address + fragment(setting, step=20, lang="en", **{"pass": pass_}))
        assert window.run("return document.documentElement.scrollWidth") <= width
        assert window.unnamed() == []
        assert window.faint(*TEXTS) == []
        folder = os.environ.get("FA2TVM_SCREENSHOTS")
        if folder:
            path = Path(folder) / f"viz_{pass_}_{width}_{scheme}.png"
            path.write_bytes(window.screenshot())
    window.resize(1280, 900)
    window.prefer("light")
    assert not window.messages()


TEXTS = (
    "#say", ".where", "#formula", ".lead", "h2 span", ".note", ".mat td[data-value]", ".mat th",
    ".flag", ".segmented button", "#listing li.on", "#listing li", "figcaption", "#counts th",
    "#count",
)  # fmt: skip


def test_one_file_and_no_network() -> None:
    text = page()
    assert not re.search(
        r"""(src|href)=["'](?!data:)|@import|url\((?!["']?data:)|https?://""", text
    )
    assert "/*{" not in text


def test_the_ready_page_is_up_to_date() -> None:
    """`make docs` makes it again."""
    ready = Path(__file__).parent.parent / "docs" / "visualizer.html"
    theirs, ours = ready.read_text(encoding="utf-8"), page()
    # The traces' last digits are the machine's.
    cut = '"traces"'
    assert theirs.partition(cut)[0] == ours.partition(cut)[0]
    assert theirs.rpartition("</script>\n<script>")[2] == ours.rpartition("</script>\n<script>")[2]


def test_a_large_setting_is_left_to_the_page() -> None:
    large = page(Setting(32, 32, 8, 2, 2))
    assert '"traces"' not in large
    assert '"seq_q":32' in large
