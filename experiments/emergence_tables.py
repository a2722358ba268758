"""The tables of sink emergence, each as headings and rows of strings: onset, last checkpoint, steps, controls."""

from collections.abc import Sequence

from experiments.results import Row
from experiments.summary import number

NAMES = {"lasting": "(a) 10 x uniform", "head": "(b) first head", "half": "(c) half of final"}
_FINAL = (
    "model",
    "last step",
    "share",
    "x uniform",
    "top layer",
    "top head",
    "x uniform",
    "first layer",
    "heads > 0.3",
)
_STEPS = {
    "step": lambda row: f"{row['step']:,}",
    "share": lambda row: _percent(row["share"]),
    "x uniform": lambda row: number(row["x_uniform"]),
    "top layer": lambda row: _percent(row["max_layer"]),
    "top head": lambda row: _percent(row["max_head"]),
    "its x uniform": lambda row: number(row["max_head_x_uniform"]),
    "heads > 0.3": lambda row: f"{row['heads_over']}/{row['heads']}",
    "Sink_1^0.3": lambda row: _percent(row["sink_rate"]),
    "with BOS": lambda row: _percent(row["sink_rate_bos"]),
    "massive": lambda row: number(row["massive"]),
    "value norm": lambda row: number(row["value_norm"]),
    "full": lambda row: number(row["perplexity_full"]),
    "window": lambda row: number(row["perplexity_window"]),
    "1 sink": lambda row: number(row["perplexity_sinks1"]),
    "4 sinks": lambda row: number(row["perplexity_sinks4"]),
}


def onset_table(summaries: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a row for each model and definition."""
    rows = []
    for each in summaries:
        for name, onset in each["onset"].items():
            crossing, per_step = onset["crossing"], each["tokens_per_step"]
            tokens = "-" if crossing is None or per_step is None else _tokens(crossing["step"] * per_step)
            rows.append([each["series"], NAMES[name], _step(crossing), tokens, _between(crossing), _interval(onset)])
    return ["model", "definition", "step", "tokens", "checkpoints", "95% over documents"], rows


def final_table(summaries: Sequence[Row]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings and rows: a row for each model."""
    rows = []
    for each in summaries:
        if (last := each["final"]) is not None:
            layer = "none" if last["first_active_layer"] is None else str(last["first_active_layer"])
            shares = [_percent(last["share"]), number(last["x_uniform"]), _percent(last["max_layer"])]
            head = [_percent(last["max_head"]), number(last["max_head_x_uniform"])]
            heads = f"{last['heads_over']} of {last['heads']}"
            rows.append([each["series"], f"{last['step']:,}", *shares, *head, layer, heads])
    return _FINAL, rows


def step_table(summary: Row) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a row for each checkpoint; with a ladder's own figures, where it tells them."""
    heads = list(_STEPS)
    rows = [[cell(row) for cell in _STEPS.values()] for row in summary["steps"]]
    if summary["told"]:
        heads += ["non-trigger share", "its x uniform"]
        for row, step in zip(rows, summary["steps"], strict=True):
            told = summary["told"].get(str(step["step"]))
            row += ["-", "-"] if told is None else [_percent(told["share"]), number(told["x_uniform"])]
    kept = [index for index in range(len(heads)) if any(row[index] != "-" for row in rows)]
    return [heads[index] for index in kept], [[row[index] for index in kept] for row in rows]


def control_table(summaries: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: the last checkpoint as it is, and each of its controls."""
    rows = []
    for each in summaries:
        for name, found in {"(none)": each["final"], **each["controls"]}.items() if each["controls"] else ():
            rates = [_percent(found["sink_rate"]), _percent(found["sink_rate_bos"])]
            shares = [_percent(found["share"]), number(found["x_uniform"]), _percent(found["max_head"])]
            rows.append([each["series"], name, *shares, *rates])
    return ["model", "control", "share", "x uniform", "top head", "Sink_1^0.3", "with BOS"], rows


def published_table(summary: Row) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a row for each published figure that was measured."""
    found = summary["published"]
    rows = [
        [
            each["figure"],
            f"{each['percent']:.2f}",
            f"{each['low']:g} to {each['high']:g}",
            "met" if each["met"] else "NOT met",
        ]
        for each in found
    ]
    return ["Pythia-410M", "share found, %", "published, %", ""], rows


def _step(crossing: Row | None) -> str:
    return "not reached" if crossing is None else f"{crossing['step']:,.0f}"


def _between(crossing: Row | None) -> str:
    if crossing is None:
        return "-"
    return (
        f"{crossing['at']:,}, the first"
        if crossing["before"] is None
        else f"{crossing['before']:,} to {crossing['at']:,}"
    )


def _interval(onset: Row) -> str:
    if onset["reached"] is None:
        return "one document"
    ends = ["not reached" if onset[end] is None else f"{onset[end]:,.0f}" for end in ("low", "high")]
    part = "" if onset["reached"] in (0, 1) else f", reached in {onset['reached']:.0%}"
    return (ends[0] if ends[0] == ends[1] else " to ".join(ends)) + part


def _tokens(count: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"
