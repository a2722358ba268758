"""The report: one HTML file that needs nothing else, light or dark as the reader's system is."""

import html
import shlex
from collections.abc import Sequence
from pathlib import Path

from experiments.plots import figures, svg
from experiments.results import Results
from experiments.runs import METHODS
from experiments.summary import HEADINGS, Compared, compared, lines, number

FORGETS = (
    "A bounded cache does not remember what it evicted: it keeps predictions fluent over a text of any length, and it "
    "does not extend what the model can look back at."
)
NOTES = (
    "After evict.: perplexity of the tokens predicted after the first eviction. x full: that, divided by the full "
    "cache's on the same tokens. MiB: keys and values held at the end (recompute, reread: of one pass). ms/token: "
    "median over chunks, wall clock; for recompute, of one scored token. A star: each token of a chunk sees what it "
    "would see read singly. Below: recompute scored some tokens only, so its perplexity is not of the same text; see "
    "the next table."
)
LIKE = (
    '<p class="note">A recompute that scores some tokens only cannot be compared with the perplexity of them all; in a '
    "table below every run is scored on the same tokens.</p>"
)
_STYLE = """
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


def write_report(folder: Path, results: Results, keys: Sequence[str], argv: Sequence[str]) -> Path:
    """Writes `report.html` and each figure as a PNG; returns the report's path."""
    rows = [results[key] for key in keys]
    drawn = figures(rows)
    for name, (_, figure) in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
    first = rows[0]
    title = f"Perplexity of {first['tokens']:,} tokens under bounded caches"
    compares = compared(results, keys)
    body = [
        f"<h1>{title}</h1>",
        f"<p>{_text(first['model'])} ({first['dtype']}) reads “{_text(first['text'])}” once per method; each token is "
        "predicted from what the method lets the model see.</p>",
        f'<p class="say">{FORGETS}</p>',
        _table("", HEADINGS, [line.cells() for line in lines(results, keys)]),
        f'<p class="note">{NOTES}</p>',
        "<h2>Like with like</h2>" + LIKE if compares else "",
        *(_compared(each) for each in compares),
        "<h2>Figures</h2>",
        *(
            f"<figure>{svg(figure, name)}<figcaption>{caption}</figcaption></figure>"
            for name, (caption, figure) in drawn.items()
        ),
        "<h2>What each method means</h2><dl>",
        *(
            f"<dt>{method}</dt><dd>{_text(meaning.replace('`', ''))}.</dd>"
            for method, meaning in METHODS.items()
            if any(row["setting"]["method"] == method for row in rows)
        ),
        "</dl><h2>How to get these numbers again</h2>",
        f"<pre>{_text(shlex.join(['python', '-m', 'experiments.stream_perplexity', *argv]))}</pre>",
        _facts(results, keys),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>" + "\n".join(body) + "</body></html>\n"
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    return folder / "report.html"


def _compared(each: Compared) -> str:
    rows = [(label, number(value), number(ratio)) for label, value, ratio in each.rows]
    return _table(each.title + ".", ("run", "perplexity", "x full"), rows)


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(each)}</th>' for each in headings)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    above = f"<caption>{_text(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(results: Results, keys: Sequence[str]) -> str:
    row = results[keys[0]]
    dates = sorted(results[key]["date"] for key in keys)
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    host = row["host"]
    facts = {
        "model": f"{row['model']}, revision {row['revision'] or row['commit'] or 'as it is'}, weights {row['weights']}",
        "text": f"{row['text']}, SHA-256 {row['text_sha256']}",
        "tokens": f"{row['tokens']:,}, ids' SHA-256 {row['ids_sha256']}",
        "versions": f"{versions}, Python {host['python']}",
        "machine": f"{host['device']}, {host['cores']} cores, {row['threads']} threads, {host['system']}, "
        f"attention {row['attention']}",
        "measured": dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        "keys of the runs": " ".join(keys),
    }
    return (
        "<dl>"
        + "".join(f"<dt>{name}</dt><dd><code>{_text(value)}</code></dd>" for name, value in facts.items())
        + "</dl>"
    )


def _text(value: object) -> str:
    return html.escape(str(value))
