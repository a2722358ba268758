"""The report: one HTML file that needs nothing else, and beside it the cells and the tables as files."""

import re
from collections.abc import Sequence
from pathlib import Path

from experiments.page import SCRIPT, SORTING, Shown, page, sortable, text
from experiments.plots import svg
from experiments.report import FORGETS
from experiments.reports import retrieval_shown, tables
from experiments.reports.analysis import Analysis, Part
from experiments.reports.contest import Contest
from experiments.reports.drawing import Style
from experiments.reports.figures import Drawn, figures
from experiments.reports.files import write_cells, write_summary
from experiments.reports.groups import CONDITIONS, named
from experiments.reports.provenance import foot
from experiments.reports.source import called
from experiments.whole import put

TITLE = "Policies at equal budgets"
_STYLE = """
body { max-width: 74rem; } table.sorts :is(th, td) { padding: .35rem .45rem; }
 h3 { font-size: 1rem; margin-top: 1.8rem; } .foot { margin: .5rem 0 1.6rem; }
.foot pre { font-size: .74rem; margin: .3rem 0; padding: .45rem .7rem; } .foot p.note { font-size: .78rem; margin: 0; }
figure { max-width: 50rem; }
"""
_SAFE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_HEAD = f'<meta http-equiv="Content-Security-Policy" content="{_SAFE}"><style>{SORTING}{_STYLE}</style>'
_METHODS = {
    "full": "the model's own cache, which keeps every token",
    "policy": "a cache that holds `budget` tokens a layer; what is evicted is gone",
    "recompute": "no cache between tokens: the newest tokens, as many as the budget, are read anew for each",
    "reread": "no cache between stretches: the newest tokens are read anew every so many",
}


def write(analysis: Analysis, out: Path) -> Path:
    """Writes `report.html`, `cells.csv`, `results.parquet` and `summary.csv` into `out`; returns the report's path."""
    out.mkdir(parents=True, exist_ok=True)
    write_cells(out, analysis.found.rows)
    parts = analysis.parts
    write_summary(
        out,
        [(part.group, contest) for part in parts for contest in part.contests],
        [(part.group, task) for part in parts for task in part.tasks],
    )
    put(out / "report.html", page(TITLE, _body(analysis), _HEAD))
    return out / "report.html"


def _body(analysis: Analysis) -> list[str]:
    labels = {result.line.label for part in analysis.parts for each in part.contests for result in each.results}
    labels |= {line.label for part in analysis.parts for task in part.tasks for line in task.lines}
    style = Style(sorted(labels))
    methods = sorted({row["asked"]["method"] for row in analysis.found.rows if row["asked"].get("method") in _METHODS})
    return [
        f"<h1>{TITLE}</h1>",
        f'<p class="say">{FORGETS}</p>',
        _notes(analysis),
        _between(analysis),
        *(piece for number, part in enumerate(analysis.parts) for piece in _part(analysis, part, style, number)),
        _failed(analysis),
        "<h2>What the words mean</h2><dl>",
        *(f"<dt>{each}</dt><dd>{text(_METHODS[each].replace('`', ''))}.</dd>" for each in methods),
        f'</dl><p class="note">{tables.NOTES}</p>',
        f'<p class="note">{retrieval_shown.NOTES}</p>' if any(part.tasks for part in analysis.parts) else "",
        f"<script>{SCRIPT}</script>",
    ]


def _part(analysis: Analysis, part: Part, style: Style, number: int) -> list[str]:
    body = [
        f"<h2>{text(part.group.title)}</h2>",
        f'<p class="note">{text(named(part.group.conditions, CONDITIONS))}</p>',
    ]
    for index, family in enumerate(part.families):
        for panel in family:
            body += [piece for contest in panel for piece in _contest(analysis, part, contest)]
        body += _pictures(figures([panel[0] for panel in family], style), f"stream-{number}-{index}")
    for index, task in enumerate(part.tasks):
        heads, rows = retrieval_shown.table(task)
        body += [f"<h3>{text(task.setting.title)}</h3>", *_loud(task.notes), sortable("", heads, rows), foot(task.rows)]
        body += _pictures(retrieval_shown.figures(task, style), f"retrieval-{number}-{index}")
    return body


def _contest(analysis: Analysis, part: Part, contest: Contest) -> list[str]:
    title = contest.panel.setting.title
    title += "" if contest.of is None else f": on the tokens that {contest.of} scored after the first eviction"
    about = f"{tables.drawn(contest)} {tables.lacking(contest, analysis.failed(contest, part))}".strip()
    body = [
        f"<h3>{text(title[0].upper() + title[1:])}</h3>",
        *_loud(contest.notes),
        f"<p>{text(tables.standings(contest))}</p>",
        f'<p class="note">{text(about)}</p>',
        sortable("", *tables.quality(contest)),
        foot(contest.rows),
    ]
    if contest.of is None:
        body += [
            sortable(
                "Costs: median of the documents. Cells that were measured side by side share the machine.",
                tables.COST,
                tables.cost(contest),
            ),
            foot(contest.rows),
        ]
    return body


def _pictures(drawn: dict[str, Drawn], name: str) -> list[str]:
    body = []
    for key, each in drawn.items():
        told = f'<svg role="img" aria-label="{text(each.caption)}" '
        picture = re.sub(r"<metadata>.*?</metadata>", "", svg(each.figure, f"{name}-{key}"), flags=re.DOTALL)
        picture = picture.replace("<svg ", told, 1)
        body += [f"<figure>{picture}<figcaption>{text(each.caption)}</figcaption></figure>", foot(each.rows)]
    return body


def _notes(analysis: Analysis) -> str:
    notes = list(analysis.found.notes)
    if analysis.found.failed:
        count = len(analysis.found.failed)
        notes.append(f"{count} cell{'s' * (count > 1)} failed: named at the end, with the reason")
    titles = {part.group.title for part in analysis.parts}
    models = {part.group.conditions["model"] for part in analysis.parts}
    if len(titles) > len(models):
        notes.append(
            "One model was measured under different conditions: each set of them has its tables, and no figure is an "
            "average over two"
        )
    return "".join(_loud([f"{note}." for note in notes]))


def _between(analysis: Analysis) -> str:
    """Models side by side, in what may be compared between them."""
    if len({part.group.conditions["model"] for part in analysis.parts if part.contests}) < 2:
        return ""
    shown = [(part, each) for part in analysis.parts for each in part.contests if each.of is None]
    rows = [
        [
            Shown(part.group.title, "", part.group.title),
            Shown(contest.panel.setting.title, "", contest.panel.setting.title),
            Shown(result.line.label, "", result.line.label),
            tables.estimated(result.bits_per_byte, tables.three),
            tables.estimated(result.ratio, tables.three),
        ]
        for part, contest in shown
        for result in contest.results
    ]
    heads = ("model", "setting", "policy", "bits per byte", "x full")
    words = (
        "Their tokens differ, so their perplexities cannot be compared, nor anything else that is counted by token: "
        "only bits per byte of text, and the ratio to the model's own full cache."
    )
    cells = [row for _, contest in shown for row in contest.rows]
    return f'<h2>Between models</h2><p class="say">{words}</p>{sortable("", heads, rows)}{foot(cells)}'


def _failed(analysis: Analysis) -> str:
    if not analysis.found.failed:
        return ""
    rows = [
        [Shown(called(row), "", called(row)), Shown(str(row["reason"]), "", str(row["reason"]))]
        for row in analysis.found.failed
    ]
    return f"<h2>Failed cells</h2>{sortable('', ('cell', 'reason'), rows)}{foot(analysis.found.failed)}"


def _loud(notes: Sequence[str]) -> list[str]:
    return [f'<p class="say">{text(note)}</p>' for note in notes]
