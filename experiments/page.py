"""A page that needs nothing else, light or dark as the reader's system is: its style, tables and figures."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.plots import svg

STYLE = """
:root { color-scheme: light dark; --ink: #1a1b1e; --page: #ffffff; --soft: #5b6068; --line: #d8dade; --tint: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --page: #15171a; --soft: #a2a8b0; --line: #363a40; --tint: #1e2125; }
  figure svg { filter: brightness(1.2); }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 54rem;
  margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.4rem; }
p.note, figcaption, dd { color: var(--soft); font-size: .92rem; }
p.say { border-left: 4px solid #E69F00; padding: .3rem 0 .3rem .9rem; }
.wide { overflow-x: auto; }
.wide + .wide { margin-top: 1.6rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
caption { caption-side: top; text-align: left; padding-bottom: .4rem; color: var(--soft); }
figure { margin: 1.6rem 0; } figure svg { width: 100%; height: auto; color: var(--ink); }
pre { background: var(--tint); padding: .8rem 1rem; overflow-x: auto; border-radius: 6px; white-space: pre-wrap; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1.2rem; } code { overflow-wrap: anywhere; }
"""
SORTING = """
table.sorts th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
  text-align: inherit; }
table.sorts th button:focus-visible { outline: 2px solid #0072B2; outline-offset: 3px; }
table.sorts th button::after { content: " \\2195"; opacity: .45; }
table.sorts th[aria-sort="ascending"] button::after { content: " \\2191"; opacity: 1; }
table.sorts th[aria-sort="descending"] button::after { content: " \\2193"; opacity: 1; }
table.sorts td { vertical-align: top; } table.sorts .words { text-align: left; white-space: normal; }
table.sorts small { display: block; color: var(--soft); font-size: .74rem; }
"""
SCRIPT = """
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const each of heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...[...body.rows].sort((row, other) => {
      const one = row.cells[column].dataset.order, two = other.cells[column].dataset.order;
      if (one === "" || two === "") return (one === "") - (two === "");
      const order = isNaN(one) || isNaN(two) ? one.localeCompare(two) : one - two || 0;
      return up ? order : -order;
    }));
  }));
}
"""


@dataclass(frozen=True)
class Shown:
    """What a cell of a table that sorts says, in small letters below it, and what it is sorted by; None comes last."""

    says: str
    below: str = ""
    order: float | str | None = None


def page(title: str, body: Sequence[str], more: str = "") -> str:
    """The whole file; `more` comes last in its head."""
    head = f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
    head += f"<style>{STYLE}</style>{more}"
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}</head>'
    return head + "<body>" + "\n".join(body) + "</body></html>\n"


def pictures(drawn: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Figures, each with its caption below; by name, which must be unique in a page."""
    return [
        f"<figure>{svg(figure, name)}<figcaption>{text(caption)}</figcaption></figure>"
        for name, (caption, figure) in drawn.items()
    ]


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways where it is wider than the page; all of it is text."""
    head = "".join(f'<th scope="col">{text(each)}</th>' for each in headings)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    above = f"<caption>{text(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def sortable(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Shown]]) -> str:
    """A table whose rows a click on a heading sorts, or a key; `SORTING` and `SCRIPT` must be in the page."""
    words = [all(isinstance(row[index].order, str) for row in rows) for index in range(len(headings))]
    kinds = [' class="words"' if each else "" for each in words]
    head = "".join(
        f'<th scope="col"{kind}><button type="button">{text(each)}</button></th>'
        for kind, each in zip(kinds, headings, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_sorted_by, row, kinds))}</tr>" for row in rows)
    above = f"<caption>{text(caption)}</caption>" if caption else ""
    inner = f"{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="sorts">{inner}</table></div>'


def _sorted_by(cell: Shown, kind: str) -> str:
    order = cell.order
    if isinstance(order, float) and math.isinf(order):
        order = "Infinity" if order > 0 else "-Infinity"
    below = f"<small>{text(cell.below)}</small>" if cell.below else ""
    return f'<td{kind} data-order="{text("" if order is None else order)}">{text(cell.says)}{below}</td>'


def text(value: object) -> str:
    """Whatever it is, as text in HTML."""
    return html.escape(str(value))
