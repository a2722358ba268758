"""Which tokens a layer and head hold as a text is read: a picture for each policy.

Across is what has been read, up are positions of the text: dark where the token is held, pale where it was let go,
blank where it is yet to come. A window is a band along the diagonal, sinks are a line along the floor; a policy that
froze on its prompt draws lines that begin at the left and never end, one that leans to the old is dark at the bottom.

    python -m experiments.kept_raster --policy StreamingLLM,H2O,SnapKV --budget 128 --layer 10 --head 0
"""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from torch import Tensor, nn

from experiments.contestants import HORIZONS, POLICIES, made
from experiments.options import Parser, at_least, choices, numbers
from experiments.plots import INK
from experiments.policy_quality import loaded
from experiments.subject import subject
from sinkcache import Policy, SinkCache, prefill
from sinkcache.models import EMBEDDED
from sinkcache.recording import record
from sinkcache.texts import embedded, from_file

Place = tuple[int, int]  # layer, key head
Raster = Bool[Tensor, "steps tokens"]
_SHADES = "·░▒▓█"  # of the tokens behind a character none is held, up to an eighth, up to half, most, all
_COLUMNS, _ROWS = 78, 16  # characters
_PIXELS = 256  # rows of an image's panel at most


def rasters(
    model: nn.Module,
    input_ids: Int[Tensor, "1 kv_len"],
    policy: Policy,
    budget: int,
    chunk: int,
    places: Sequence[Place],
) -> dict[Place, Raster]:
    """Per place, which positions are held after each chunk; positions are original.

    Raises ValueError if the model has no such layer, bounded, or key head.
    """
    held = SinkCache(model, policy, budget, positions="original")
    drawn = {place: torch.zeros(-(-input_ids.shape[1] // chunk), input_ids.shape[1]).bool() for place in places}
    for step, piece in enumerate(input_ids.split(chunk, dim=1)):
        prefill(model, held, piece, chunk)
        for layer, head in places:
            kept = _kept(held, layer)
            if head >= len(kept):
                raise ValueError(f"layer {layer} has {len(kept)} key heads, got head {head}: count from 0")
            drawn[layer, head][step, kept[head][kept[head] >= 0]] = True
    return drawn


def text_of(raster: Raster, chunk: int, columns: int = _COLUMNS, rows: int = _ROWS) -> str:
    """The picture in characters, `columns` wide, the newest position at the top."""
    steps, tokens = raster.shape
    edge = max(len(str(tokens)), len("read")) + 1
    across = columns - edge
    across = across // steps * steps or across  # steps of equal width, where there is room
    shares, read = _shrunk(raster.float(), across, rows), _shrunk(_read(steps, tokens, chunk), across, rows)
    lines = []
    for row in range(rows - 1, -1, -1):
        label = str(tokens) if row == rows - 1 else "0" if row == 0 else ""
        shades = [_shade(float(shares[x, row]), float(read[x, row])) for x in range(across)]
        lines.append(f"{label:>{edge - 1}} {''.join(shades)}".rstrip())
    lines.append(f"{'read':>{edge - 1}} {chunk}{tokens:>{max(1, across - len(str(chunk)))}}")
    return "\n".join(lines)


def image_of(panels: dict[str, Raster], chunk: int) -> Any:
    """Small multiples as a figure, a panel for each title."""
    from matplotlib.figure import Figure  # optional, and slow to import

    wide = min(3, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(3.2 * wide, 3.0 * tall + 0.3), layout="constrained")
    grid = figure.subplots(tall, wide, squeeze=False, sharex=True, sharey=True)
    for axes, (title, raster) in zip(grid.flat, panels.items(), strict=False):
        steps, tokens = raster.shape
        rows = -(-tokens // -(-tokens // _PIXELS))
        shares, read = _shrunk(raster.float(), steps, rows), _shrunk(_read(steps, tokens, chunk), steps, rows)
        darkness = (0.08 + 0.92 * shares.sqrt()).where(read > 0, 0)  # one held of many is still to be seen
        extent = (0, tokens, 0, tokens)
        look: dict[str, Any] = {"cmap": "Greys", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
        axes.imshow(darkness.T.numpy(), origin="lower", aspect="auto", extent=extent, **look)
        axes.set_ylim(-0.02 * tokens, tokens)  # or the axis would hide the first tokens
        axes.set_title(title, fontsize=9, color=INK)
        axes.tick_params(labelsize=8, colors=INK)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    figure.supxlabel("tokens read", fontsize=9, color=INK)
    figure.supylabel("position in the text", fontsize=9, color=INK)
    return figure


def _kept(held: SinkCache, layer: int) -> Int[Tensor, "num_kv_heads kept"]:
    if layer >= len(held.layers):
        raise ValueError(f"the model has {len(held.layers)} layers, got layer {layer}: count from 0")
    return held.kept(layer)[0]


def _read(steps: int, tokens: int, chunk: int) -> Float[Tensor, "steps tokens"]:
    """1 where a position had been read by the end of a step."""
    return (torch.arange(tokens) < (torch.arange(steps)[:, None] + 1) * chunk).float()


def _shrunk(raster: Float[Tensor, "steps tokens"], across: int, up: int) -> Float[Tensor, "across up"]:
    """Means over cells of a grid."""
    return torch.nn.functional.adaptive_avg_pool2d(raster[None, None], (across, up))[0, 0]


def _shade(share: float, read: float) -> str:
    """Of the tokens that were read behind a character, how many are held."""
    if read == 0:
        return " "
    part = share / read
    return _SHADES[(part > 0) + (part > 1 / 8) + (part > 1 / 2) + (part > 0.999)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0. Ends with 2 and a line if it cannot be run."""
    command, console = _parser(), Console()
    given = command.parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        if given.budget >= given.tokens:
            raise ValueError(f"--budget {given.budget} evicts nothing from --tokens {given.tokens}: lower the budget")
        for name in given.policy:
            if name not in HORIZONS:
                POLICIES[name](given.budget).check(given.budget)
        text = from_file(given.text) if given.text else embedded()
        read = subject(loaded(given.model), text, given.tokens, given.model, None, bucket=256)
        recorded = cache(lambda: record(read.model, read.ids, given.chunk))
        places = [(layer, head) for layer in given.layer for head in given.head]
        panels: dict[str, Raster] = {}
        for name in given.policy:
            policy = made(name, given.budget, recorded)
            drawn = rasters(cast(nn.Module, read.model), read.ids, policy, given.budget, given.chunk, places)
            for (layer, head), raster in drawn.items():
                panels[f"{name}, layer {layer}, head {head}"] = raster
        for title, raster in panels.items():
            console.print(f"\n{title}, budget {given.budget}", style="bold", highlight=False)
            console.print(text_of(raster, given.chunk), highlight=False, markup=False, soft_wrap=True)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        image_of(panels, given.chunk).savefig(given.out, dpi=150, facecolor="white")
        console.print(f"\nImage: {given.out}", highlight=False, soft_wrap=True)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="kept_raster", description="Which tokens a layer and head hold as a text is read.")
    parser.add_argument("--model", default=EMBEDDED, help="hub id, folder, or the embedded one")
    parser.add_argument("--text", metavar="FILE", help="a UTF-8 file; without, the embedded text")
    parser.add_argument("--tokens", type=at_least(2), default=1024, metavar="N", help="of the text to read")
    parser.add_argument("--chunk", type=at_least(1), default=16, metavar="N", help="tokens read at once")
    parser.add_argument("--budget", type=at_least(1), default=128, metavar="N", help="tokens a layer holds")
    known, several = [*POLICIES, *HORIZONS], "StreamingLLM,H2O,SnapKV"
    parser.add_argument(
        "--policy", type=choices(*known), default=several, metavar="NAME,NAME", help="any of " + ", ".join(known)
    )
    parser.add_argument("--layer", type=numbers(0), default="0", metavar="N,N", help="from 0")
    parser.add_argument("--head", type=numbers(0), default="0", metavar="N,N", help="key heads, from 0")
    where = Path("out/kept_raster.png")
    parser.add_argument("--out", type=Path, default=where, metavar="FILE", help="the image, PNG, SVG or PDF")
    return parser


if __name__ == "__main__":
    sys.exit(main())
