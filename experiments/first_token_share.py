"""How much attention the first token gets, by layer and head, beside what it would get if attention were uniform.

Idea: Xiao et al., 2023 (arXiv 2309.17453), figure 2. Of the queries from the 65th on the attention paid to the first
token, mean over heads, then texts; a text's own mean is over all layers of attention. Uniform attention gives 1/i at
query i: 0.174% for 2,048 tokens. Beside it Sink_1^eps of segments of 64 tokens (Gu et al., 2024, arXiv 2410.10781).

Expected (SmolLM2-135M-Instruct, float32, no BOS, mean over layers): Persuasion, Emma, Pride and Prejudice 27.39, 27.46
and 28.21% at 2,048 tokens, 31.09, 30.71 and 29.92% at 512; layers 0-2 and 10-11 below 2.5%, layer 12 35%.

    python -m experiments.first_token_share --preset seed --text persuasion.txt emma.txt prideprejudice.txt
"""

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from experiments.cells import Cells
from experiments.options import Parser, at_least, numbers
from experiments.results import Row
from experiments.share_report import write
from experiments.share_tables import NOTE, mean, percent, tables
from experiments.sinks import SEGMENT, attention_facts, sink_rates
from experiments.subject import TYPES, Subject, subject
from experiments.table import _print
from sinkcache import SinkCache
from sinkcache.metrics import perplexity
from sinkcache.models import EMBEDDED, load
from sinkcache.policies import StreamingLLM
from sinkcache.texts import Text, embedded, from_file, tokenize

PRESETS: dict[str, dict[str, Any]] = {"seed": {"tokens": 2048, "first_query": 64, "bos": "none"}}  # the defaults too
CHUNK = 64  # tokens read at once, for perplexity


class Measured:
    """The cells of one text, taken from the files or measured and filed."""

    def __init__(self, console: Console, read: Subject, given: Namespace, cells: Any) -> None:
        self.console, self.read, self.given, self.cells = console, read, given, cells
        self.ids = read.ids if given.bos == "none" else _behind_bos(read.ids, read.bos)
        self.first = repr(read.tokenizer.decode(self.ids[0, :1]))

    def row(self, text: Text) -> Row:
        """All that is known of the text's attention: `facts`, `rates` by BOS, `perplexity` by number of sinks."""
        facts = self._cell(
            {"what": "share"}, lambda: attention_facts(self.read.model, self.ids, self.given.first_query)
        )
        return {
            **self._identity(),
            "first_token": self.first,
            "mean": mean([mean(each) for each in facts["share"]]),
            "uniform": mean(facts["uniform"]),
            "facts": facts,
            "rates": self._rates(text) if self.given.segments else {},
            "perplexity": {str(each): self._perplexity(each) for each in self.given.sinks},
        }

    def _rates(self, text: Text) -> Row:
        ids = tokenize(text, self.read.tokenizer, self.given.segments * SEGMENT + 1)[0]
        ids = ids[1:] if int(ids[0]) != int(self.read.ids[0, 0]) else ids  # a BOS that the tokenizer put in front
        count = min(self.given.segments, len(ids) // SEGMENT)
        plain = ids[: count * SEGMENT].view(count, SEGMENT).to(self.read.ids.device)
        kinds = (
            {"none": plain} if self.read.bos is None else {"none": plain, "prepend": _behind_bos(plain, self.read.bos)}
        )
        if not count:
            return {}

        def rates(bos: str) -> Row:
            wanted = {"what": "rates", "segments": count, "bos_of_segments": bos}
            return self._cell(wanted, lambda: sink_rates(self.read.model, kinds[bos]))

        return {bos: rates(bos) for bos in kinds}

    def _perplexity(self, sinks: int) -> float:
        budget = self.given.budget

        def measured() -> float:
            policy = StreamingLLM(sinks)
            return perplexity(self.read.model, SinkCache(self.read.model, policy, budget), self.ids, CHUNK).value

        return self._cell({"what": "perplexity", "sinks": sinks, "budget": budget, "chunk": CHUNK}, measured)

    def _cell(self, more: Row, measure: Any) -> Any:
        identity = {**self._identity(), **more}
        if "found" not in self.cells.read(identity):
            told = ", ".join(f"{name} {value}" for name, value in more.items() if name != "what")
            line = f"{self.read.identity['text']}: {more['what']}" + (f" ({told})" if told else "")
            self.console.print(line, style="dim", highlight=False, soft_wrap=True)
            self.cells.write(identity, found=measure())
        return self.cells.read(identity)["found"]

    def _identity(self) -> Row:
        dropped = ("bos", "bucket", "commit", "threads")
        told = {name: value for name, value in self.read.identity.items() if name not in dropped}
        return {**told, "bos": self.given.bos, "first_query": self.given.first_query}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 130 after Ctrl-C. Ends with 2 and a line if it cannot be run."""
    command, console, line = _parser(), Console(), list(sys.argv[1:] if argv is None else argv)
    given = command.parse_args(line)
    command.set_defaults(**PRESETS.get(given.preset, {}))
    given = command.parse_args(line)
    try:
        texts = _checked(given)
        rows = _measure(console, given, texts)
        write(given.out, rows, ["python", "-m", "experiments.first_token_share", *line])
        for title, headings, cells in tables(rows):
            _print(console, title, headings, cells)
        console.print(f"\n{NOTE}\nReport: {given.out / 'report.html'}", style="dim", highlight=False, soft_wrap=True)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        command.error(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        console.print(f"\nstopped: finished cells are kept in {given.out}", highlight=False)
        return 130
    return 0


def _checked(given: Namespace) -> list[Text]:
    """The texts, checked with all that can be told before a model is loaded."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('the figures need matplotlib: run `pip install "sinkcache[experiments]"`')
    if given.tokens <= given.first_query:
        raise ValueError(f"--first-query {given.first_query} is not among --tokens {given.tokens}: raise the tokens")
    for sinks in given.sinks:
        StreamingLLM(sinks).check(given.budget)
    if given.sinks and given.budget + 1 >= given.tokens:
        raise ValueError(f"--budget {given.budget} evicts nothing from --tokens {given.tokens}: lower the budget")
    texts = [from_file(each) for each in given.text] or [embedded()]
    for text in texts:
        if len(text.text.encode()) < given.tokens - (given.bos == "prepend"):
            raise ValueError(
                f"text {text.name!r} is shorter than --tokens {given.tokens}: lower it or give a longer one"
            )
    return texts


def _measure(console: Console, given: Namespace, texts: Sequence[Text]) -> list[Row]:
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.logging.disable_progress_bar()
    loaded, cells, rows = (
        load(given.model, TYPES[given.dtype], given.revision),
        Cells(given.out / "cells", given.fresh),
        [],
    )
    trained = getattr(loaded[0].config.get_text_config(decoder=True), "max_position_embeddings", None)
    if trained and given.tokens > trained:
        raise ValueError(f"--tokens {given.tokens} exceeds the trained length, {trained} for {given.model}: lower it")
    if given.bos == "prepend" and loaded[1].bos_token_id is None:
        raise ValueError(f"--bos prepend: the tokenizer of {given.model} has no BOS token: use --bos none")
    for text in texts:
        read = subject(loaded, text, given.tokens, given.model, given.revision, bucket=256)
        rows.append(Measured(console, read, given, cells).row(text))
        told = f"{text.name}: {percent(rows[-1]['mean'])}% to the first token, {rows[-1]['first_token']}"
        console.print(f"{told}; uniform {percent(rows[-1]['uniform'])}%", highlight=False, markup=False, soft_wrap=True)
    return rows


def _behind_bos(ids: torch.Tensor, bos: int | None) -> torch.Tensor:
    """As many tokens as before, of which the first is BOS."""
    assert bos is not None
    return torch.cat([torch.full_like(ids[:, :1], bos), ids[:, :-1]], dim=1)


def _parser() -> Parser:
    parser = Parser(prog="first_token_share", description="How much attention the first token gets, by layer and head.")
    parser.add_argument(
        "--preset", choices=PRESETS, help="seed: 2,048 tokens, queries from the 65th, no BOS; as default"
    )
    parser.add_argument("--model", default=EMBEDDED, help="hub id, folder, or the embedded one")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="UTF-8 files; without, the embedded text")
    parser.add_argument("--tokens", type=at_least(2), default=2048, metavar="N", help="of each text, BOS included")
    parser.add_argument("--first-query", type=at_least(1), default=64, metavar="N", help="index of the first counted")
    parser.add_argument("--bos", choices=("none", "prepend"), default="none", help="a BOS token as the first token")
    parser.add_argument("--dtype", choices=TYPES, default="float32", help="of the weights")
    parser.add_argument("--segments", type=at_least(0), default=100, metavar="N", help="of 64 tokens; 0: no Sink_1^eps")
    parser.add_argument(
        "--sinks",
        type=numbers(0),
        default=[],
        metavar="N,N",
        help="perplexity with so many; a pass of chunks for each",
    )
    parser.add_argument(
        "--budget", type=at_least(1), default=128, metavar="N", help="tokens a layer holds, with --sinks"
    )
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="of torch; without, torch's own choice")
    where = Path("out/first_token_share")
    parser.add_argument("--out", type=Path, default=where, metavar="DIR", help="for what is written")
    parser.add_argument("--fresh", action="store_true", help="measure finished cells again")
    return parser


if __name__ == "__main__":
    sys.exit(main())
