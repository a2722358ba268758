"""What is written of sink emergence: a row for each step, all of it as JSON, figures, and a report in one HTML file."""

import csv
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from experiments.emergence_curves import Curve
from experiments.emergence_plots import figures
from experiments.emergence_tables import NAMES, control_table, final_table, onset_table, published_table, step_table
from experiments.onset import DEFINITIONS
from experiments.page import page, pictures, table, text
from experiments.results import Row
from experiments.whole import put

NOTES = (
    "Steps between two checkpoints are interpolated, the checkpoints stand beside them; from step 0 on nothing is, the "
    "later checkpoint stands for the crossing. Intervals: middle 95% over resamples of the documents, which says how "
    "far the step depends on the text, not on the seed of training; none with a single document. In the next table, "
    "first layer: the first whose share is 10 x uniform; heads > 0.3: heads with a mean share above that."
)


def write_all(
    folder: Path, curves: Sequence[Curve], summaries: Sequence[Row], failed: dict[str, str], argv: Sequence[str]
) -> Path:
    """Writes `emergence.csv`, `emergence.json`, the figures and `report.html`; returns the report's path."""
    put(folder / "emergence.json", json.dumps({"series": list(summaries), "failed": failed}, indent=1) + "\n")
    _write_csv(folder / "emergence.csv", summaries)
    drawn = [curve for curve in curves if curve.points]
    made = figures(drawn, [curve.onsets(1, 0) for curve in drawn])
    for name, (_, figure) in made.items():
        figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
    title = "Since which training step there is an attention sink"
    body = [
        f"<h1>{title}</h1>",
        _failures(failed),
        "<h2>Onset</h2>",
        table("", *onset_table(summaries)),
        f'<p class="note">{NOTES}</p>',
        "<dl>"
        + "".join(f"<dt>{NAMES[name]}</dt><dd>{text(words)}</dd>" for name, words in DEFINITIONS.items())
        + "</dl>",
        "<h2>The last checkpoint</h2>",
        table("", *final_table(summaries)),
        _published(summaries),
        "<h2>Figures</h2>",
        *pictures(made),
        "<h2>Step by step</h2>",
        *(table(row["series"], *step_table(row)) for row in summaries if row["steps"]),
        _controls(summaries),
        "<h2>How to get these numbers again</h2>",
        f"<pre>{text(shlex.join(['python', '-m', 'experiments.sink_emergence', *argv]))}</pre>",
        _facts(drawn),
    ]
    put(folder / "report.html", page(title, body))
    return folder / "report.html"


def printed(summaries: Sequence[Row]) -> str:
    """For the console: onset and last checkpoint as tables, and each published figure beside what was found."""
    parts = [_markdown(*onset_table(summaries)), _markdown(*final_table(summaries))]
    parts += [f"{row['series']}\n\n{_markdown(*step_table(row))}" for row in summaries if row["steps"]]
    if any(row["controls"] for row in summaries):
        parts.append(_markdown(*control_table(summaries)))
    parts += [_markdown(*published_table(row)) for row in summaries if row["published"]]
    return "\n" + "\n\n".join(parts)


def _published(summaries: Sequence[Row]) -> str:
    parts = [table("", *published_table(row)) for row in summaries if row["published"]]
    note = "The published curve is of texts that are not these, so a figure may lie beside its band for that alone."
    return f"<h2>Against the published curve</h2><p class='note'>{note}</p>" + "".join(parts) if parts else ""


def _controls(summaries: Sequence[Row]) -> str:
    if not any(row["controls"] for row in summaries):
        return ""
    note = (
        "Of the last checkpoint. Shuffled: the entries of each weight permuted. Random: tokens drawn evenly from the "
        "vocabulary. Repeated: one token over and over, which rotary positions tell apart by distance only."
    )
    return f"<h2>Controls</h2><p class='note'>{note}</p>" + table("", *control_table(summaries))


def _failures(failed: dict[str, str]) -> str:
    lines = "".join(f"<li>{text(name)}: {text(reason)}</li>" for name, reason in failed.items())
    return f'<div class="say"><p>Not measured, so not in any curve:</p><ul>{lines}</ul></div>' if failed else ""


def _facts(curves: Sequence[Curve]) -> str:
    told = []
    for curve in curves:
        row = curve.points[-1].rows[0]
        asked, documents = row["asked"], [each["asked"]["document"] for each in curve.points[-1].rows]
        budget = (
            "no perplexity" if row["perplexity"] is None else f"budget {row['perplexity']['budget']} at cache positions"
        )
        settings = (
            f"{row['tokens']:,} tokens each, queries from {asked['first_query']} on, BOS {asked['bos']}, {budget}"
        )
        told += [f"<dt>{text(curve.series)}</dt>", f"<dd>{text(f'{settings}; {asked_type(asked)}')}</dd>"]
        told += [f"<dd>documents: {text(', '.join(documents))}</dd>", f"<dd>{text(row['lacks'] or '')}</dd>"]
        weights = ", ".join(f"step {point.step}: {point.rows[0]['weights']}" for point in curve.points)
        told += [f"<dd>weights: <code>{text(weights)}</code></dd>"]
    return f"<dl>{''.join(told)}</dl>"


def asked_type(asked: Row) -> str:
    """Type, device and versions of a cell, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in asked["versions"].items())
    return f"{asked['dtype']} on {asked['device']}; {versions}"


def _write_csv(path: Path, summaries: Sequence[Row]) -> None:
    rows = [{"series": each["series"], **row} for each in summaries for row in each["steps"]]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name != "layers"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))
