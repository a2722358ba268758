"""A plan as a picture: bytes of one conversation against its length, engine by engine, and the memory there is."""

from collections.abc import Sequence
from pathlib import Path

from sinkcache.planner import Plan
from sinkcache.planner.engines import Engine

_POINTS = 60
_GIB = 2**30


def plot(made: Plan, engines: Sequence[Engine], path: Path, memory: int | None = None) -> None:
    """Draws bytes held against tokens, both axes logarithmic, into `path`.

    `memory`: bytes there are for caches, drawn as a line. Raises ModuleNotFoundError without matplotlib, ValueError if
    `path` cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # optional, and slow to import
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a plot needs matplotlib: `pip install matplotlib`, or `pip install "sinkcache[experiments]"`'
        ) from error
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.add_subplot()
    refused = {row.name for row in made.engines if row.refused is not None}
    able = [engine for engine in engines if engine.name not in refused]
    lengths = spread(min(*made.lengths, 1024), max(made.lengths))
    for index, engine in enumerate(able):  # thinner ones over thicker, as engines may agree
        held = [engine.held(made.model, each) / _GIB for each in lengths]
        axes.plot(lengths, held, label=engine.name, linewidth=1 + 4 * (len(able) - index) / len(able))
    if memory is not None:
        axes.axhline(memory / _GIB, color="black", linestyle="--", label=f"memory, {memory / _GIB:.1f} GiB")
    axes.set(xscale="log", yscale="log", xlabel="tokens of the conversation", ylabel="GiB", title=made.model.name)
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"plot {str(path)!r} cannot be written: {error}") from error


def spread(first: int, last: int) -> list[int]:
    """Whole numbers from `first` to `last` in about equal ratios, without repeats."""
    ratio = (last / first) ** (1 / (_POINTS - 1))
    return sorted({min(round(first * ratio**index), last) for index in range(_POINTS)} | {first, last})
