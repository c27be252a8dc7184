"""Pictures of reports: each is drawn once and kept as SVG for the page and as PNG beside it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COLORS = ("#2f7fb8", "#d9813f", "#5d9c59", "#9a77c9", "#8a8f98", "#c05b6c", "#3f9c98")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Stands for the colour of text: black in a PNG, the page's own in its SVG, light or dark.
INK = "#010203"
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 8,
    "ytick.color": INK,
    "ytick.labelsize": 8,
}


@dataclass(frozen=True)
class Picture:
    """A drawing with what it shows in words."""

    name: str
    alt: str
    svg: str
    png: bytes


def draw(
    name: str,
    alt: str,
    size: tuple[float, float],
    paint: Callable[[Any], None],
) -> Picture:
    """Let `paint` fill a matplotlib Figure of `size` inches."""
    import matplotlib
    from matplotlib.figure import Figure

    # The salt makes ids of two pictures on one page differ, and the same picture the same bytes.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        figure.savefig(png, format="png", dpi=140, facecolor="white")
    text = svg.getvalue().decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'font: [\d.]+px [^;"]*', lambda m: m[0].split("px ")[0] + "px system-ui", text)
    return Picture(name, alt, text, png.getvalue())
