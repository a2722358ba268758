"""The figures of the first token's share, its report, and what a program reads: CSV and JSON."""

import csv
import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.page import page, pictures, table, text
from experiments.plots import COLOURS, INK, LEGEND, MARKS, panel
from experiments.results import Row
from experiments.share_tables import NOTE, by_layer, mean, tables
from experiments.whole import put


def write(folder: Path, rows: Sequence[Row], command: Sequence[str]) -> None:
    """Writes figures, `layers.csv`, `results.json` and `report.html`, each whole or as it was before."""
    drawn, sheet = figures(rows), io.StringIO()
    for name, (_, figure) in drawn.items():
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, facecolor="white")
        put(folder / f"{name}.png", image.getvalue())
    lines = [{"text": row["text"], **line} for row in rows for line in by_layer([row])]
    writer = csv.DictWriter(sheet, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    put(folder / "layers.csv", sheet.getvalue().encode())
    put(folder / "results.json", (json.dumps(rows, indent=1, sort_keys=True) + "\n").encode())
    title, first = "Attention to the first token", rows[0]
    about = f"{first['model']} ({first['dtype']}, weights {first['weights']}), the first "
    about += f"{first['facts']['tokens']:,} tokens of each text, queries from index {first['first_query']} on, "
    about += f"BOS: {first['bos']}."
    body = [f"<h1>{title}</h1><p>{text(about)}</p>"]
    body += [f"<h2>{text(name)}</h2>{table('', heads, cells)}" for name, heads, cells in tables(rows)[:2]]
    body += [f'<p class="note">{text(NOTE)}</p><h2>Figures</h2>']
    body += pictures(drawn)
    body += [f"<h2>{text(name)}</h2>{table('', heads, cells)}" for name, heads, cells in tables(rows)[2:]]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    again = f"<pre>{text(shlex.join(command))}</pre><p>{text(versions)}</p>"
    body.append(f"<h2>How to get these numbers again</h2>{again}")
    put(folder / "report.html", page(title, body))


def figures(rows: Sequence[Row]) -> dict[str, tuple[str, Any]]:
    """By file name: a caption, and the figure; the uniform baseline is in each that shows shares."""
    facts, lines = [row["facts"] for row in rows], by_layer(rows)
    layers = [str(line["layer"]) for line in lines]
    layered, axes = panel("layer", "attention to the first token, %")
    axes.plot(layers, [100 * line["largest_head"] for line in lines], color=INK, linestyle=":", label="largest head")
    many = [[mean(each) for each in fact["share"]] for fact in facts]
    _lines(axes, layers, rows, many, [line["uniform"] for line in lines])
    axes.set_xticks(range(0, len(layers), -(-len(layers) // 16)))
    ranged, axes = panel("queries, index from - to", "attention to the first token, %")
    names = [f"{start}-{stop - 1}" for start, stop in facts[0]["ranges"]]
    many = [[mean(each) for each in zip(*fact["share_by_range"], strict=True)] for fact in facts]
    uniform = [mean(each) for each in zip(*facts[0]["uniform_by_range"], strict=True)]
    _lines(axes, names, rows, many, uniform)
    made = {
        "share_by_head": ("Share of each layer and head, mean over texts.", _heat(facts, lines)),
        "share_by_layer": ("Share by layer, mean over heads; dashed: uniform attention.", layered),
        "share_by_query": ("Share over ranges of queries, mean over layers and heads; dashed: uniform.", ranged),
    }
    if rows[0]["perplexity"]:
        curve, axes = panel("first tokens never evicted", "perplexity")
        _lines(axes, list(rows[0]["perplexity"]), rows, [[e / 100 for e in row["perplexity"].values()] for row in rows])
        made["perplexity_by_sinks"] = ("Perplexity under a bounded cache, by number of sinks.", curve)
    return made


def _heat(facts: Sequence[Row], lines: Sequence[Row]) -> Any:
    layers, baseline = [str(line["layer"]) for line in lines], mean([line["uniform"] for line in lines])
    wide = max(len(each) for each in facts[0]["share"])
    grid = torch.full((len(layers), wide), torch.nan)
    for at in range(len(layers)):
        heads = torch.tensor([fact["share"][at] for fact in facts]).mean(dim=0)
        grid[at, : len(heads)] = 100 * heads
    heat, axes = panel("query head", "layer")
    axes.grid(False)
    drawn = axes.pcolormesh(grid.numpy(), cmap="cividis", vmin=0, vmax=max(1.0, float(grid.nan_to_num().max())))
    axes.set_yticks([at + 0.5 for at in range(0, len(layers), -(-len(layers) // 16))], layers[:: -(-len(layers) // 16)])
    axes.set_xticks([at + 0.5 for at in range(0, wide, -(-wide // 16))], range(0, wide, -(-wide // 16)))
    bar = heat.colorbar(drawn, ax=axes)
    bar.set_label(f"attention to the first token, % (red: uniform, {100 * baseline:.3f})", color=INK, fontsize=9)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.ax.axhline(100 * baseline, color=COLOURS["window"], linewidth=2)
    return heat


def _lines(axes: Any, across: Sequence[str], rows: Sequence[Row], many: Any, uniform: Sequence[float] = ()) -> None:
    colours = [each for each in COLOURS.values() if each != INK]
    for index, (row, values) in enumerate(zip(rows, many, strict=True)):
        style = {"color": colours[index % len(colours)], "marker": MARKS[index % len(MARKS)], "markersize": 3.5}
        axes.plot(across, [100 * each for each in values], linewidth=1.2, label=row["text"], **style)
    if uniform:
        axes.plot(across, [100 * each for each in uniform], color=INK, linestyle="--", linewidth=1, label="uniform")
    axes.set_ylim(bottom=0 if uniform else None)
    axes.figure.legend(**LEGEND)
