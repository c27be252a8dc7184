"""The visualizer as one HTML file: no network, no framework, the Python trace inside."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from fa2tvm.problem import PASSES
from fa2tvm.viz.events import Version
from fa2tvm.viz.setting import Setting
from fa2tvm.viz.trace import trace

_SCRIPTS = ("trace.js", "words.js", "draw.js", "player.js")
_VERSIONS: tuple[Version, ...] = (1, 2)
# Events of all four traces that a page carries along at most; larger settings are computed in the
# page alone.
_MOST_EVENTS = 2000


def page(setting: Setting | None = None) -> str:
    """The page that plays a setting, the example by default.

    The traces travel with the page, which compares its own numbers with them and says so.
    """
    setting = setting or Setting()
    traces = {
        f"{pass_} {version}": [event.to_dict() for event in trace(setting, pass_, version)]
        for pass_ in PASSES
        for version in _VERSIONS
    }
    given = {"setting": setting.to_dict()}
    if sum(map(len, traces.values())) <= _MOST_EVENTS:
        given["traces"] = traces
    parts = {
        "style": source("style.css"),
        "given": json.dumps(given, separators=(",", ":")),
        "script": "\n".join(source(name) for name in _SCRIPTS),
    }
    text = source("page.html")
    for name, part in parts.items():
        text = text.replace(f"/*{{{name}}}*/", part)
    return text


def source(name: str) -> str:
    """One of the files that the page is made of."""
    return (resources.files("fa2tvm.viz") / "page" / name).read_text(encoding="utf-8")


def write_page(path: Path, setting: Setting | None = None) -> Path:
    """Write the page of a setting; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(setting), encoding="utf-8")
    return path
