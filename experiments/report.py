"""The report: one HTML file that needs nothing else, light or dark as the reader's system is."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from experiments.page import page, pictures, table, text
from experiments.plots import figures
from experiments.results import Results
from experiments.runs import METHODS
from experiments.summary import HEADINGS, Compared, compared, lines, number
from experiments.whole import put

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
        f"<p>{text(first['model'])} ({first['dtype']}) reads “{text(first['text'])}” once per method; each token is "
        "predicted from what the method lets the model see.</p>",
        f'<p class="say">{FORGETS}</p>',
        table("", HEADINGS, [line.cells() for line in lines(results, keys)]),
        f'<p class="note">{NOTES}</p>',
        "<h2>Like with like</h2>" + LIKE if compares else "",
        *(_compared(each) for each in compares),
        "<h2>Figures</h2>",
        *pictures(drawn),
        "<h2>What each method means</h2><dl>",
        *(
            f"<dt>{method}</dt><dd>{text(meaning.replace('`', ''))}.</dd>"
            for method, meaning in METHODS.items()
            if any(row["setting"]["method"] == method for row in rows)
        ),
        "</dl><h2>How to get these numbers again</h2>",
        f"<pre>{text(shlex.join(['python', '-m', 'experiments.stream_perplexity', *argv]))}</pre>",
        _facts(results, keys),
    ]
    put(folder / "report.html", page(title, body))
    return folder / "report.html"


def _compared(each: Compared) -> str:
    rows = [(label, number(value), number(ratio)) for label, value, ratio in each.rows]
    return table(each.title + ".", ("run", "perplexity", "x full"), rows)


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
        + "".join(f"<dt>{name}</dt><dd><code>{text(value)}</code></dd>" for name, value in facts.items())
        + "</dl>"
    )
