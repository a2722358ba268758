"""The command `plan`: what a model's cache costs in each engine, and how many users fit. Starts without torch.

Exit code 1 says that not one user fits, or that `--verify` found other bytes than planned; 2 is a mistake.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console

from sinkcache.options import Parser, number
from sinkcache.planner import LENGTHS, Plan, default_engines, plan
from sinkcache.planner.capacity import Class
from sinkcache.planner.in_llamacpp import LlamaCpp
from sinkcache.planner.in_sinkcache import bounded
from sinkcache.planner.in_vllm import VLLM
from sinkcache.planner.kinds import FLOATS, FORMATS, Model
from sinkcache.planner.report import csv_lines, tables
from sinkcache.planner.sources import config_path, is_gguf, model_of
from sinkcache.planner.users import Users, count_users
from sinkcache.planner.weights import bytes_of, parsed

_ABOUT = "say what a model's cache costs, to the byte, and how many users fit; nothing is loaded"


def main(argv: list[str]) -> int:
    """Runs the command on its own; returns the exit code. `--help` leaves by SystemExit, as argparse does."""
    parser = Parser(prog="sinkcache plan", description=f"{_ABOUT.capitalize()}.")
    try:
        _add_options(parser)
        return run(parser.parse_args(argv))
    except (ValueError, ModuleNotFoundError) as error:
        print("sinkcache:", " ".join(str(error).split()), file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("sinkcache: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 141


def add(commands) -> None:
    """Adds the command to those of the command line."""
    parser = commands.add_parser("plan", help=_ABOUT, description=f"{_ABOUT.capitalize()}.")
    _add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plans, counts users, verifies, and prints; returns the exit code."""
    model = model_of(args.model, getattr(args, "dtype", None), getattr(args, "as", None), args.revision)
    engines = default_engines(
        model, _llamacpp(args), _vllm(args), args.policy, args.budget, args.chunk, args.source_tokens
    )
    made = plan(model, args.lengths, engines)
    memory = _memory(args, model)
    users = None
    if memory is not None:
        users = count_users(
            made,
            engines,
            memory,
            getattr(args, "mix", ()),
            getattr(args, "users", None),
            lambda budget: bounded(args.policy, budget, args.chunk),
        )
    verdict = _verified(args) if "verify" in args else None
    if "plot" in args:
        from sinkcache.planner.plot import plot  # needs matplotlib, which is optional

        plot(made, engines, Path(args.plot), memory)
    _print(args, made, users, verdict)
    return 1 if (users is not None and not users.anyone) or (verdict is not None and not verdict["exact"]) else 0


def _print(args: argparse.Namespace, made: Plan, users: Users | None, verdict: dict | None) -> None:
    if args.json:
        told = {**made.as_dict(), "users": None if users is None else users.as_dict(), "verified": verdict}
        print(json.dumps(told, indent=2))  # noqa: T201
    elif args.csv:
        print("\n".join(csv_lines(made, users)))  # noqa: T201
    else:
        console = Console(highlight=False)
        for part in tables(made, users, verdict):
            console.print(part, markup=False)


def _verified(args: argparse.Namespace) -> dict:
    """What the model on the meta device says; torch and transformers are imported for it alone."""
    path = config_path(args.model, args.revision)
    if is_gguf(path):
        raise ValueError(f"--verify is for a config, and {args.model!r} is a GGUF file: transformers does not run it")
    from sinkcache.planner.verify import verify_config  # needs torch, and seconds

    return verify_config(path, args.verify, getattr(args, "as", None)).as_dict()


def _memory(args: argparse.Namespace, model: Model) -> int | None:
    """Bytes there are for caches: as given, or of a GPU what its weights and reserve leave."""
    if "memory" in args:
        if "gpu" in args:
            raise ValueError("--memory is for the cache alone and --gpu for all: give one of them")
        return args.memory
    if "gpu" not in args:
        if "mix" in args or "users" in args:
            raise ValueError("--mix and --users need to know the memory: give --memory 24GiB, or --gpu 80GB")
        return None
    if not 0 < args.utilisation <= 1:
        raise ValueError(f"--utilisation must be in (0, 1], got {args.utilisation}")
    parameters = round(args.parameters) if "parameters" in args else model.parameters
    weights = bytes_of(args.weights, parameters, model.weights)
    left = round(args.gpu * args.utilisation) - weights
    if left <= 0:
        raise ValueError(f"weights of {weights:,} bytes leave nothing of {args.utilisation:.0%} of {args.gpu:,} bytes")
    return left


def _llamacpp(args: argparse.Namespace) -> LlamaCpp:
    return LlamaCpp(
        args.parallel, args.unified, args.ubatch, args.swa_full, args.cache_type_k, args.cache_type_v, args.draft
    )


def _vllm(args: argparse.Namespace) -> VLLM:
    return VLLM(
        args.max_num_batched_tokens,
        1 if args.no_async_scheduling else 2,
        not args.no_prefix_caching,
        args.block_size,
        None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    missing = argparse.SUPPRESS
    parser.add_argument("model", metavar="MODEL", help="hub id in the cache, config.json, folder, or GGUF file")
    parser.add_argument("--revision", metavar="REV", default="main", help="branch, tag or commit of a hub id")
    parser.add_argument("--as", metavar="TYPE", default=missing, help="model_type by whose rules to read the config")
    parser.add_argument("--dtype", choices=FLOATS, default=missing, help=(
        "of the cache (default: that of the weights)"))  # fmt: skip
    parser.add_argument("--lengths", type=_lengths, metavar="N,N", default=",".join(map(str, LENGTHS)), help=(
        "tokens to plan for"))  # fmt: skip
    parser.add_argument("--source-tokens", type=number(int, 0), metavar="N", default=0, help="that cross layers read")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON only")
    form.add_argument("--csv", action="store_true", help="print comma-separated values only")
    parser.add_argument("--plot", metavar="FILE", default=missing, help="draw bytes against length (needs matplotlib)")
    parser.add_argument("--verify", type=number(int, 1), metavar="TOKENS", nargs="?", default=missing, help=(
        "run the model on the meta device and compare"))  # fmt: skip
    _add_users(parser.add_argument_group("users"))
    _add_engines(parser)


def _add_users(group: argparse._ArgumentGroup) -> None:
    missing = argparse.SUPPRESS
    group.add_argument("--memory", type=_size, metavar="SIZE", default=missing, help="for caches, such as 24GiB")
    group.add_argument("--gpu", type=_size, metavar="SIZE", default=missing, help="in all, weights included")
    group.add_argument("--weights", metavar="WHAT", default="stored", help=(
        f"a size, a format ({', '.join(FORMATS)}), or that of the model's files"))  # fmt: skip
    group.add_argument("--parameters", type=number(float, 1), metavar="N", default=missing, help="weights there are")
    group.add_argument("--utilisation", type=number(float, 0), metavar="F", default=0.9, help="share of --gpu to use")
    group.add_argument("--mix", type=_mix, metavar="IN:OUT:SHARE,...", default=missing, help=(
        "classes of requests, such as 1000:200:0.8,30000:500:0.2"))  # fmt: skip
    group.add_argument("--users", type=number(int, 1), metavar="N", default=missing, help=(
        "of the longest length, or of the mix: which budget fits them"))  # fmt: skip


def _add_engines(parser: argparse.ArgumentParser) -> None:
    types = tuple(FORMATS)
    llama = parser.add_argument_group("llama.cpp")
    llama.add_argument("--parallel", type=number(int, 1), metavar="N", default=1, help="slots, -np")
    llama.add_argument("--unified", action="store_true", help="one cache for all slots, -kvu")
    llama.add_argument("--ubatch", type=number(int, 1), metavar="N", default=512, help="-ub")
    llama.add_argument("--swa-full", action="store_true", help="sliding layers keep everything")
    llama.add_argument("--cache-type-k", choices=types, metavar="TYPE", default="f16", help="-ctk: f16, q8_0, q4_0 ...")
    llama.add_argument("--cache-type-v", choices=types, metavar="TYPE", default="f16", help="-ctv")
    llama.add_argument("--draft", type=number(int, 0), metavar="N", default=0, help="tokens drafted at a time")
    vllm = parser.add_argument_group("vLLM")
    vllm.add_argument("--max-num-batched-tokens", type=number(int, 1), metavar="N", default=8192, help="of a batch")
    vllm.add_argument("--no-async-scheduling", action="store_true", help="one batch in flight, not two")
    vllm.add_argument("--no-prefix-caching", action="store_true", help="one state a group, not two")
    vllm.add_argument("--block-size", type=number(int, 1), metavar="N", default=16, help="tokens of a block")
    vllm.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of keys and values")
    ours = parser.add_argument_group("SinkCache")
    ours.add_argument("--policy", metavar="POLICY", default="StreamingLLM(num_sinks=4)", help="what is evicted")
    ours.add_argument("--budget", type=number(int, 1), metavar="N", default=1024, help="tokens a layer holds")
    ours.add_argument("--chunk", type=number(int, 1), metavar="N", default=512, help="prompt tokens a pass")


def _lengths(text: str) -> list[int]:
    return [int(number(int, 1)(each.strip())) for each in text.split(",")]


def _size(text: str) -> int:
    try:
        value = parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, got {text}")
    return value


def _mix(text: str) -> list[Class]:
    classes = []
    for part in text.split(","):
        fields = part.split(":")
        try:
            classes.append(Class(int(fields[0]), int(fields[1]), float(fields[2])))
        except (ValueError, IndexError) as error:
            why = f": {error}" if isinstance(error, ValueError) else ""
            raise argparse.ArgumentTypeError(f"a class is written as IN:OUT:SHARE, got {part!r}{why}") from error
    return classes
