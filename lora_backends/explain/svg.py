"""An explanation as one SVG: batch order, kernel order, pieces, launches."""

from __future__ import annotations

import textwrap
from html import escape

from lora_backends.explain import Explanation, Launch, Share

WIDTH, MARGIN = 960, 24
MOST_LINES = 96
"""Largest number of tokens that are joined by lines from batch order to kernel order."""
MOST_PIECES = 32

_INNER = WIDTH - 2 * MARGIN
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44aa99")
_NONE, _EMPTY, _TEXT, _PALE = "#bbbbbb", "#f2f2f2", "#222222", "#666666"


def draw(explanation: Explanation) -> str:
    """Return the drawing as the text of an SVG file."""
    page = _Page()
    layer = explanation.layer
    widths = "+".join(map(str, layer.output_slices))
    page.text(
        f"{explanation.backend}, {explanation.operation}: {len(explanation.token_slots)} tokens "
        f"over {explanation.num_slots} slots",
        18,
        _TEXT,
    )
    page.text(f"layer {layer.in_features} to {widths}, width of the stack {layer.max_rank}")
    page.gap(10)
    _draw_order(page, explanation)
    _draw_pieces(page, explanation)
    _draw_launches(page, explanation)
    for fact in explanation.facts:
        page.text(fact)
    page.gap(6)
    for line in textwrap.wrap(explanation.legend, 140):
        page.text(line)
    return page.finish()


class _Page:
    """Shapes from top to bottom."""

    def __init__(self) -> None:
        self.y = float(MARGIN)
        self._parts: list[str] = []

    def gap(self, height: float) -> None:
        self.y += height

    def text(self, words: str, size: int = 12, colour: str = _PALE) -> None:
        """Add a line of text at the bottom."""
        self.y += size + 5
        self.label(MARGIN, self.y - 5, words, size, colour, "start")

    def label(
        self, x: float, y: float, words: str, size: int, colour: str, anchor: str = "middle"
    ) -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
            f'fill="{colour}" stroke="#ffffff" stroke-width="{min(1.0, width / 8):.2f}"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        self._parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" '
            f'stroke="{colour}" stroke-opacity="0.6"/>'
        )

    def finish(self) -> str:
        height = self.y + MARGIN
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}" font-family="sans-serif">\n'
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def _colour(slot: int) -> str:
    return _COLOURS[slot % len(_COLOURS)] if slot >= 0 else _NONE


def _draw_order(page: _Page, explanation: Explanation) -> None:
    """Draw the tokens in batch order and in kernel order, and lines between."""
    count = max(1, len(explanation.token_slots))
    cell = min(28.0, _INNER / count)
    page.text("tokens in batch order: the colour is the slot, grey is no adapter", 13, _TEXT)
    top = page.y + 4
    for token, slot in enumerate(explanation.token_slots):
        page.box(MARGIN + token * cell, top, cell, 22, _colour(slot))
        if cell >= 14:
            page.label(MARGIN + (token + 0.5) * cell, top + 15, str(token), 10, "#ffffff")
    below = top + 72
    for place, token in enumerate(explanation.order):
        slot = explanation.token_slots[token]
        page.box(MARGIN + place * cell, below, cell, 22, _colour(slot))
        if cell >= 14:
            page.label(MARGIN + (place + 0.5) * cell, below + 15, str(token), 10, "#ffffff")
        # more lines would fill the whole area
        if count <= MOST_LINES:
            start, end = MARGIN + (token + 0.5) * cell, MARGIN + (place + 0.5) * cell
            page.line(start, top + 22, end, below, _colour(slot))
    page.y = below + 22
    page.text("in kernel order: sorted by slot, those without an adapter left out")
    page.gap(12)


def _draw_pieces(page: _Page, explanation: Explanation) -> None:
    """Draw each piece with a box per place; empty places are pale."""
    drawn = explanation.pieces[:MOST_PIECES]
    left_out = len(explanation.pieces) - len(drawn)
    more = f", the first {len(drawn)} drawn" if left_out else ""
    count = f"{len(explanation.pieces)} {explanation.piece_name}s"
    page.text(f"{count}{more}: pale places are empty", 13, _TEXT)
    page.gap(4)
    places = max((piece.places for piece in drawn), default=1)
    left = MARGIN + 210
    cell = min(22.0, (WIDTH - MARGIN - left) / places)
    for number, piece in enumerate(drawn):
        ranks = sorted(set(explanation.layer.ranks[piece.slot]))
        rank = "/".join(map(str, ranks))
        words = f"{explanation.piece_name} {number}: slot {piece.slot}, rank {rank}, "
        words += f"{len(piece.tokens)} of {piece.places}"
        page.label(MARGIN, page.y + 13, words, 11, _TEXT, "start")
        for place in range(piece.places):
            used = place < len(piece.tokens)
            page.box(left + place * cell, page.y, cell, 18, _colour(piece.slot) if used else _EMPTY)
            if used and cell >= 16:
                middle = left + (place + 0.5) * cell
                page.label(middle, page.y + 13, str(piece.tokens[place]), 9, "#ffffff")
        page.gap(21)
    page.gap(12)


def _draw_launches(page: _Page, explanation: Explanation) -> None:
    """Draw the useful share of the lanes of each launch, axis by axis."""
    page.text("launches: the pale part of a bar is wasted", 13, _TEXT)
    page.gap(4)
    for launch in explanation.launches:
        idle = f", {launch.idle} of them without work" if launch.idle else ""
        page.text(f"{launch.name}: {launch.programs} {launch.unit}{idle}", 12, _TEXT)
        page.gap(3)
        for name, share in _axes(launch).items():
            part = 1 - share.wasted
            page.label(MARGIN + 12, page.y + 11, name, 11, _PALE, "start")
            page.box(MARGIN + 150, page.y, 400, 14, _EMPTY)
            page.box(MARGIN + 150, page.y, 400 * part, 14, "#4477aa")
            words = f"{share.used} of {share.computed}: {100 * share.wasted:.0f}% wasted"
            page.label(MARGIN + 560, page.y + 11, words, 11, _PALE, "start")
            page.gap(17)
        page.gap(6)


def _axes(launch: Launch) -> dict[str, Share]:
    columns = "inputs" if launch.name == "shrink" else "columns of y"
    return {
        "rows (tokens)": launch.rows,
        columns: launch.columns,
        "ranks": launch.ranks,
        "products": launch.products,
    }
