"""What was found of the first token's share, as tables: by layer, by text, and beside it."""

from collections.abc import Sequence

from experiments.results import Row
from experiments.sinks import SEGMENT
from experiments.summary import number

NOTE = (
    "Shares in percent, mean over heads, then texts. Uniform: what the first token would get if each query shared its "
    "attention out evenly. Entropy is a part of the greatest there could be; |v|: the norm of the first value over the "
    "mean of the others; massive: the largest activation behind the block, over the median. Most at: the most "
    "attended position if it is not 0, in the first text."
)


def by_layer(rows: Sequence[Row]) -> list[Row]:
    """A row for each layer of attention, means over texts; shares are parts of one."""
    lines, facts = [], [row["facts"] for row in rows]
    for at, layer in enumerate(facts[0]["layers"]):
        heads = [mean(each) for each in zip(*(fact["share"][at] for fact in facts), strict=True)]
        share, uniform = mean(heads), mean([fact["uniform"][at] for fact in facts])
        massive = [fact["massive"][layer]["ratio"] for fact in facts if layer < len(fact["massive"])]
        top = next(([place, part] for place, part in facts[0]["top"][at][:1] if place != 0), None)
        learned = [mean(fact["learned"][at]) for fact in facts if fact["learned"][at] is not None]
        lines.append(
            {
                "layer": layer,
                "share": share,
                "uniform": uniform,
                "times_uniform": share / uniform if uniform else None,
                "share_four": mean([mean(fact["share_four"][at]) for fact in facts]),
                "largest_head": max(heads),
                "head": heads.index(max(heads)),
                "entropy": mean([mean(fact["entropy"][at]) for fact in facts]),
                "first_choice": mean([mean(fact["first_choice"][at]) for fact in facts]),
                "value_norm": mean([fact["value_norm"][at] for fact in facts]),
                "massive": mean(massive) if massive else None,
                "elsewhere": None if top is None else top[0],
                "elsewhere_share": None if top is None else top[1],
                "learned": mean(learned) if learned else None,
            }
        )
    return lines


def tables(rows: Sequence[Row]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, headings and cells: by layer, by text, positions, and what else was asked for."""
    lines, found = by_layer(rows), []
    heads = [
        "layer",
        "first",
        "uniform",
        "x uniform",
        "first 4",
        "largest head",
        "entropy",
        "|v|",
        "massive",
        "most at",
    ]
    some = any(line["learned"] is not None for line in lines)
    cells = [[*_cells(line), *([percent(line["learned"])] if some else [])] for line in lines]
    found.append(("Attention to the first token, by layer", heads + ["learned sinks"] * some, cells))
    cells = [[row["text"], row["first_token"], percent(row["mean"]), percent(row["uniform"])] for row in rows]
    over = [f"all {len(rows)}", "", *(percent(mean([row[each] for row in rows])) for each in ("mean", "uniform"))]
    found.append(("Mean over all layers", ["text", "first token", "first", "uniform"], [*cells, over]))
    tops = [
        [str(layer), ", ".join(f"{place} ({percent(part)})" for place, part in top[:4])]
        for layer, top in zip(rows[0]["facts"]["layers"], rows[0]["facts"]["top"], strict=True)
    ]
    found.append((f"Positions that get most attention, {rows[0]['text']}", ["layer", "positions (share)"], tops))
    rates = [
        [row["text"], bos, *(percent(each[0]) for each in rate.values())]
        for row in rows
        for bos, rate in row["rates"].items()
    ]
    if rates:
        eps = list(next(iter(rows[0]["rates"].values())))
        found.append((f"Sink_1^eps, segments of {SEGMENT} tokens", ["text", "BOS", *(f"eps {e}" for e in eps)], rates))
    if rows[0]["perplexity"]:
        cells = [[row["text"], *(number(each) for each in row["perplexity"].values())] for row in rows]
        found.append(("Perplexity, by number of sinks kept", ["text", *rows[0]["perplexity"]], cells))
    return found


def _cells(line: Row) -> list[str]:
    place = "-" if line["elsewhere"] is None else str(line["elsewhere"])
    shares = [percent(line[each]) for each in ("share", "uniform")]
    times = "-" if line["times_uniform"] is None else f"{line['times_uniform']:.1f}"
    head = percent(line["largest_head"])
    massive = "-" if line["massive"] is None else f"{line['massive']:,.0f}"
    numbers = [f"{line['entropy']:.2f}", f"{line['value_norm']:.2f}", massive]
    return [str(line["layer"]), *shares, times, percent(line["share_four"]), head, *numbers, place]


def percent(share: float | None) -> str:
    """A share as a number of percent; "-" for none."""
    if share is None:
        return "-"
    return f"{100 * share:.3f}" if share < 0.005 else f"{100 * share:.2f}"


def mean(values: Sequence[float]) -> float:
    """Of one number at least."""
    return sum(values) / len(values)
