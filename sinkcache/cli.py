"""The command line: `python -m sinkcache generate`, `inspect`, `calibrate`, `policies` and `plan`.

A user's mistake is one line on stderr and exit code 2, found before the model is loaded where that is possible. A model
that `inspect` finds cannot be bounded is exit code 1, as is a plug-in that cannot be listed; Ctrl-C is 130. Standard
output carries the result alone.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice, takewhile

import torch
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from sinkcache import SinkCache, __version__
from sinkcache.book import check_budget
from sinkcache.budgets import evened
from sinkcache.calibration import calibrate
from sinkcache.generation import Status, encode, pieces, sample, stop_tokens, tokens_of
from sinkcache.inspection import FIRST_QUERY, SAMPLE, Refused, inspect
from sinkcache.models import EMBEDDED, load
from sinkcache.options import Parser, budgets, device, number
from sinkcache.planner import command
from sinkcache.plugins import listing, named
from sinkcache.policies import StreamingLLM, Window
from sinkcache.policy import Policy
from sinkcache.report import tables
from sinkcache.texts import embedded, from_file, tokenize

_SINKS = 4  # the paper's
_CALIBRATED = "H2O(recent=16, num_sinks=4, half_life=256, reduce='mean')"  # what closes most of the gap, measured


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code. `--help` and `--version` leave by SystemExit, as argparse does."""
    try:
        args = _parser().parse_args(argv)
        logging.disable_progress_bar()  # of weights being loaded; downloads keep theirs
        hub_logging.set_verbosity_error()  # its retries would be twelve lines before ours
        return args.run(args)
    except (ValueError, ModuleNotFoundError) as error:
        print("sinkcache:", " ".join(str(error).split()), file=sys.stderr)  # noqa: T201
        return 2
    except torch.OutOfMemoryError as error:
        print("sinkcache: out of memory:", str(error).split("\n")[0], file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("sinkcache: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sinkcache", description="Bounded KV caches for transformers.")
    parser.add_argument("--version", action="version", version=f"sinkcache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_inspect(commands)
    _add_calibrate(commands)
    _add_policies(commands)
    command.add(commands)
    return parser


def _add_generate(commands) -> None:
    about = "continue a prompt, in memory that does not grow with it"
    parser = commands.add_parser("generate", help=about, description=f"{about.capitalize()}.")
    _add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt itself", default=argparse.SUPPRESS)
    prompt.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with it", default=argparse.SUPPRESS)
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--policy", metavar="POLICY", default="streaming-llm", help=(
        "what is evicted: streaming-llm, window, or any of `policies`, such as \"H2O(recent=64)\""))  # fmt: skip
    parser.add_argument("--sinks", type=number(int, 0), metavar="N", default=argparse.SUPPRESS, help=(
        f"first tokens that are never evicted, with streaming-llm (default: {_SINKS})"))  # fmt: skip
    parser.add_argument("--budget", type=budgets, metavar="N", default=1024, help=(
        "tokens a layer holds, sinks included; or a share of the prompt, such as 0.25; or a list of these, one for "
        "each layer that is bounded, as `calibrate` prints it"))  # fmt: skip
    parser.add_argument("--evict-every", type=number(int, 1), metavar="N", default=1, help=(
        "tokens that a full layer gives up at once"))  # fmt: skip
    parser.add_argument("--positions", choices=("cache", "original"), default=argparse.SUPPRESS, help=(
        "count positions within the cache or in the stream (default: the policy's own)"))  # fmt: skip
    parser.add_argument("--max-new-tokens", type=number(int, 1), metavar="N", default=256, help="where to stop at last")
    parser.add_argument("--temperature", type=number(float, 0), metavar="T", default=0.0, help="0 takes the likeliest")
    parser.add_argument("--top-p", type=number(float, 0), metavar="P", default=1.0, help=(
        "sample among the likeliest tokens that make up this probability"))  # fmt: skip
    parser.add_argument("--seed", type=number(int, 0), metavar="N", default=0, help="of the sampling")
    parser.add_argument("--prefill-chunk", type=number(int, 1), metavar="N", default=512, help="prompt tokens a pass")
    parser.set_defaults(run=_generate)


def _add_inspect(commands) -> None:
    about = "report a model's layers, positions, attention sink, and the sinks it needs"
    parser = commands.add_parser("inspect", help=about, description=f"{about.capitalize()}.")
    _add_model(parser)
    parser.add_argument("--text", metavar="FILE", default=argparse.SUPPRESS, help=(
        "a UTF-8 text to measure on (default: Python's language reference)"))  # fmt: skip
    parser.add_argument("--tokens", type=number(int, FIRST_QUERY + 1), metavar="N", default=512, help=(
        "of the text, to measure attention on"))  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.set_defaults(run=_inspect)


def _add_calibrate(commands) -> None:
    about = "share a budget out among a model's layers, by what each misses of a text"
    parser = commands.add_parser("calibrate", help=about, description=(
        f"{about.capitalize()}. Prints a JSON list, the budget of SinkCache and of `generate --budget`."))  # fmt: skip
    _add_model(parser)
    parser.add_argument("--text", metavar="FILE", default=argparse.SUPPRESS, help=(
        "a UTF-8 text like those to come (default: Python's language reference)"))  # fmt: skip
    parser.add_argument("--tokens", type=number(int, 2), metavar="N", default=3072, help="of the text, to read")
    parser.add_argument("--policy", metavar="POLICY", default=_CALIBRATED, help="what is evicted, any of `policies`")
    parser.add_argument(
        "--budget", type=number(int, 1), metavar="N", default=256, help="tokens a layer holds, on average"
    )
    parser.add_argument("--even", type=number(float, 0), metavar="P", default=0.25, help=(
        "the part of the budget that all layers share alike, from 0 to 1"))  # fmt: skip
    parser.add_argument("--chunk", type=number(int, 1), metavar="N", default=64, help="tokens read at once")
    parser.set_defaults(run=_calibrate)


def _add_policies(commands) -> None:
    about = "list what --policy takes: fields, what is evicted, what is read, plug-ins"
    parser = commands.add_parser("policies", help=about, description=f"{about.capitalize()}.")
    parser.set_defaults(run=_policies)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", default=EMBEDDED, help="embedded model, folder, or hub id")
    parser.add_argument(
        "--revision", metavar="REV", default=argparse.SUPPRESS, help="branch, tag or commit of a hub id"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights")
    parser.add_argument("--device", type=device, default="cpu", help="cpu, cuda, cuda:1, mps, ...")


def _generate(args: argparse.Namespace) -> int:
    policy = _policy(args)
    for each in args.budget if isinstance(args.budget, list) else [args.budget]:
        if isinstance(each, int):
            check_budget(policy, each, args.evict_every)
    choose = _chooser(args)
    prompt = from_file(args.prompt_file).text if "prompt_file" in args else args.prompt
    if not prompt:
        raise ValueError("the prompt is empty: give at least one character, with --prompt or --prompt-file")
    model, tokenizer = _load(args)
    input_ids = encode(tokenizer, prompt, args.chat).to(model.device)
    cache = SinkCache(model, policy, args.budget, getattr(args, "positions", None), evict_every=args.evict_every)
    stops, code = stop_tokens(model, tokenizer), 0
    with Status(cache) as status:
        try:
            endless = tokens_of(model, cache, input_ids, args.prefill_chunk, choose, status)
            tokens = takewhile(lambda token: token not in stops, endless)
            for piece in pieces(islice(tokens, args.max_new_tokens), tokenizer):
                status.say(piece)
        except KeyboardInterrupt:
            code = 130
        status.say("\n")
    print(status.summary() + ("; interrupted" if code else ""), file=sys.stderr)  # noqa: T201
    return code


def _policy(args: argparse.Namespace) -> Policy:
    if args.policy == "streaming-llm":
        return StreamingLLM(num_sinks=getattr(args, "sinks", _SINKS))
    if "sinks" in args:
        raise ValueError(f"--sinks {args.sinks} is for --policy streaming-llm: others have fields, H2O(num_sinks=4)")
    return Window() if args.policy == "window" else named(args.policy)


def _chooser(args: argparse.Namespace) -> Callable[[Tensor], int]:
    """Picks a token id by its logits; sampling is in float32 on the CPU, so that a seed means the same everywhere."""
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p must be in (0, 1], got {args.top_p}")
    if args.temperature == 0:
        if args.top_p != 1:
            raise ValueError(f"--top-p {args.top_p} needs sampling: add a --temperature above 0, such as 0.7")
        return lambda logits: int(logits.argmax())
    return partial(sample, args.temperature, args.top_p, torch.Generator().manual_seed(args.seed))


def _load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with Console(stderr=True).status(f"loading {args.model}"):  # shows on a terminal only
        return load(args.model, getattr(torch, args.dtype), getattr(args, "revision", None), args.device)


def _inspect(args: argparse.Namespace) -> int:
    text = from_file(args.text) if "text" in args else embedded()
    model, tokenizer = _load(args)
    input_ids = tokenize(text, tokenizer, limit=max(args.tokens, SAMPLE))
    about = {"model": args.model, "dtype": args.dtype, "text": text.name, "sha256": text.sha256}
    try:
        with Console(stderr=True).status(f"measuring {args.model}"):
            found = inspect(model, tokenizer, input_ids, args.tokens)
    except Refused as refusal:
        if args.json:
            print(json.dumps({**about, "refused": str(refusal)}, indent=2))  # noqa: T201
        else:
            print(f"{args.model} cannot be bounded: {refusal}")  # noqa: T201
        return 1
    if args.json:
        print(json.dumps({**about, "refused": None, **found.as_dict()}, indent=2))  # noqa: T201
    else:
        console = Console(highlight=False)
        console.print(f"{args.model}, {args.dtype}, on {text.name}", markup=False)
        for table in tables(found):
            console.print(table, markup=False)
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    policy = named(args.policy)
    check_budget(policy, args.budget, 1)
    if args.tokens <= args.budget:
        raise ValueError(f"--budget {args.budget} evicts nothing from --tokens {args.tokens}: raise --tokens")
    evened([args.budget], args.even)
    text = from_file(args.text) if "text" in args else embedded()
    model, tokenizer = _load(args)
    input_ids = tokenize(text, tokenizer, limit=args.tokens)
    if input_ids.shape[1] < args.tokens:
        raise ValueError(f"text {text.name!r} has {input_ids.shape[1]} tokens, got --tokens {args.tokens}: lower it")
    with Console(stderr=True).status(f"calibrating {args.model}"):
        found = calibrate(model, input_ids, policy, args.budget, args.chunk, even=args.even)
    print(f"{args.model}, {policy!r}, {args.tokens} tokens of {text.name}", file=sys.stderr)  # noqa: T201
    print(json.dumps(found))  # noqa: T201
    return 0


def _policies(args: argparse.Namespace) -> int:
    text, wrong = listing(min(Console().width, 120))
    print(text, end="")  # noqa: T201
    for each in wrong:
        print("sinkcache:", " ".join(each.split()), file=sys.stderr)  # noqa: T201
    return 1 if wrong else 0
