"""Pictures of reports: each is drawn once and kept as SVG for the page and as PNG beside it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COLORS = (
    "#2f7fb8", "#d9813f", "#5d9c59", "#9a77c9", "#8a8f98", "#c05b6c", "#3f9c98", "#b59b2a",
    "#7a5a44",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
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
    return Picture(name, alt, _compact(svg.getvalue().decode()), _with_few_colors(png))


def _with_few_colors(png: io.BytesIO) -> bytes:
    """The picture with a palette, which takes a third of the bytes."""
    from PIL import Image

    small = io.BytesIO()
    with Image.open(png) as image:
        palette = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        palette.save(small, format="png", optimize=True)
    return small.getvalue()


def _compact(svg: str) -> str:
    """What a page needs of matplotlib's SVG, in its own colour and font: a third of the bytes."""
    text = svg[svg.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r" ?font-family: [^;\"]*;?", "", text)
    text = re.sub(r'font: ([\d.]+px) [^;"]*', r"font-size: \1", text)
    text = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), text)
    named = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in named else "", text)
    text = re.sub(r"\s+", " ", text).replace("> <", "><").replace("<g></g>", "")
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'style="[^"]*"', lambda m: re.sub(r"([:;]) ", r"\1", m[0]), text)
    return re.sub(r"<g( [^>]*)?>((?:<use [^>]*/>)+)</g>", _styled_once, text)


def _styled_once(group: re.Match[str]) -> str:
    """Markers of one style under a group that has it."""
    styles = set(re.findall(r'style="([^"]*)"', group[2]))
    if len(styles) != 1:
        return group[0]
    (style,) = styles
    bare = group[2].replace(f' style="{style}"', "")
    return f'<g{group[1] or ""} style="{style}">{bare}</g>'
