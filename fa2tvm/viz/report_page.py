"""A report as one HTML file: sections of text, tables and pictures under their provenance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fa2tvm.viz.figures import Picture
from fa2tvm.viz.render import source


@dataclass(frozen=True)
class Link:
    """Text that leads to a section of the same page."""

    text: str
    anchor: str


Entry = str | Link | tuple[str, str]
TableRow = list[Entry]


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, HTML and pictures in order."""

    title: str
    parts: tuple[str | Picture, ...]
    level: int = 2
    anchor: str = ""


def paragraph(text: str) -> str:
    """Text as HTML."""
    return f"<p>{escape(text)}</p>"


def folded(summary: str, content: str) -> str:
    """HTML that is shown when asked for."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def table(header: Sequence[str], rows: Iterable[Sequence[Entry]], label: str) -> str:
    """A table named `label`, whose first column names the row; an entry may be (text, style)."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = ""
    for row in rows:
        cells = ""
        for place, value in enumerate(row):
            text, style = value if isinstance(value, tuple) else (value, "")
            attribute = f' style="{escape(style)}"' if style else ""
            if place:
                cells += f"<td{attribute}>{_inline(text)}</td>"
            else:
                cells += f'<th scope="row">{_inline(text)}</th>'
        body += f"<tr>{cells}</tr>"
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _inline(text: str | Link) -> str:
    if isinstance(text, Link):
        return f'<a href="#{escape(text.anchor)}">{escape(text.text)}</a>'
    return escape(text)


def ratio_style(ratio: float) -> str:
    """A tint for a ratio: blue above 1, orange below, full at a factor of two.

    It grows with the root, so that a few per cent show.
    """
    share = min(1.0, max(ratio, 1 / ratio) - 1) ** 0.5
    color = "--plus" if ratio >= 1 else "--minus"
    return f"background:color-mix(in srgb, var({color}) {round(60 * share)}%, transparent)"


def write_report(path: Path, title: str, lead: str, sections: Sequence[Section]) -> list[Path]:
    """Write the page at `path`, and its pictures as PNG in the folder `path` without its suffix.

    Returns what was written, the page first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path]
    body = ""
    for section in sections:
        name = f' id="{escape(section.anchor)}"' if section.anchor else ""
        body += f"<h{section.level}{name}>{escape(section.title)}</h{section.level}>"
        for part in section.parts:
            if isinstance(part, Picture):
                png = path.with_suffix("") / f"{part.name}.png"
                png.parent.mkdir(exist_ok=True)
                png.write_bytes(part.png)
                written.append(png)
                alt = escape(part.alt)
                body += f'<figure role="img" aria-label="{alt}">{part.svg}</figure>'
                body += f"<p class=caption>{alt}</p>"
            else:
                body += part
    text = source("report.html")
    for name, part in {
        "style": source("report.css"),
        "title": escape(title),
        "lead": escape(lead),
        "body": body,
    }.items():
        text = text.replace(f"/*{{{name}}}*/", part)
    path.write_text(text, encoding="utf-8")
    return written
