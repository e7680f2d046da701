"""What the figures of these pages are drawn with: SVG, as text."""

from __future__ import annotations

from xml.sax.saxutils import escape

INK, SOFT, LINE, PAPER = "#1f2937", "#6b7280", "#cbd5e1", "#f8fafc"
FILL, EMPTY = "#0284c7", "#e2e8f0"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b5cf6", "#4b5563")
"""Told apart by people who do not see all colours (Okabe and Ito)."""


def text(
    x: float, y: float, words: str, size: int = 13, anchor: str = "start", fill: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 0) -> str:
    edge = f' stroke="{stroke}"' if stroke != "none" else ""
    round_ = f' rx="{radius:g}"' if radius else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{edge}{round_}/>'


def curve(points: str, colour: str, width: float = 1.6, arrow: bool = True, opacity: float = 1) -> str:
    head = ' marker-end="url(#head)"' if arrow else ""
    faint = f' opacity="{opacity:g}"' if opacity < 1 else ""
    return f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="{width:g}"{head}{faint}/>'


def picture(width: int, height: float, title: str, parts: list[str]) -> str:
    """The whole file."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/></marker>'
    )
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif" role="img">\n<title>{escape(title)}</title>'
    )
    return "\n".join([frame, f"<defs>{head}</defs>", box(0, 0, width, height, "white", radius=8), *parts, "</svg>", ""])
