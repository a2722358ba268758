"""Planners of cache memory against ours: six configs at 32,768 tokens, one conversation, keys and values in bfloat16.

    python -m venv PEERS
    PEERS/bin/pip install hf-mem==0.5.6 kvfit==0.3.0 modelinfo-cli==1.4.4
    python -m benchmarks.planners [--python PEERS/bin/python] [--tokens N]

`--python` names the interpreter of an environment with the others, by default this one; what is not installed there is
skipped, and a line says so. Nothing is fetched. The commands of hf-mem and kvfit take a hub id alone, so their own
functions are given the config (`compute_safetensors_kv_cache_size`, of a nested config the text part, as their command
does; `estimate_cache`); modelinfo's command reads a config beside a file of weights, and `calculate_footprint` is what
it calls: without weights it cannot look at shapes where the config says nothing.

First table: ours, bytes by engine. Second: theirs in MiB, and how far that is from what later queries can see, the
least that an engine could hold; "=" names an engine of ours that holds as many bytes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from sinkcache import __version__
from sinkcache.planner import Plan, plan
from sinkcache.planner.in_llamacpp import LlamaCpp
from sinkcache.planner.in_transformers import Dynamic, Unaware
from sinkcache.planner.in_vllm import VLLM

_CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "planner_models.json"
_MODELS = ("Qwen3-8B", "Mistral-7B-v0.3", "gemma-3-4b", "gpt-oss-20b", "DeepSeek-V2-Lite", "Qwen3.5-9B")
_ENGINES = {
    "DynamicCache": Dynamic(512),
    "every layer grows": Unaware(),
    "llama.cpp": LlamaCpp(),
    "llama.cpp --swa-full": LlamaCpp(swa_full=True),
    "vLLM": VLLM(),
    "vLLM, no prefix caching": VLLM(prefix_caching=False),
}
_MIB = 2**20

# Runs in the other environment: a job on standard input, {tool: null or {version, answers: bytes or a reason}} out.
_PEER = """
import contextlib, importlib.metadata, json, sys

def hf_mem(config, tokens):
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size
    return compute_safetensors_kv_cache_size(config.get("text_config", config), "BF16", tokens)

def kvfit(config, tokens):
    from kvfit.architectures import estimate_cache
    return estimate_cache(config, context_tokens=tokens, kv_bytes=2.0).total_bytes

def modelinfo(config, tokens):
    from modelinfo.calculator import calculate_footprint
    return calculate_footprint({}, context_length=tokens, config=config)["kv_cache_bytes"]

def answer(ask, config, tokens):
    try:
        return ask(config, tokens)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def told(name, ask, job):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return {"version": version, "answers": {k: answer(ask, v, job["tokens"]) for k, v in job["configs"].items()}}

job = json.load(sys.stdin)
with contextlib.redirect_stdout(sys.stderr):
    tools = {"hf-mem": hf_mem, "kvfit": kvfit, "modelinfo-cli": modelinfo}
    found = {name: told(name, ask, job) for name, ask in tools.items()}
print(json.dumps({"python": sys.version.split()[0], "tools": found}))
"""


def main() -> int:
    """Prints both tables; 2 if the other environment cannot be asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="of an environment with the others")
    parser.add_argument("--tokens", type=int, metavar="N", default=32_768)
    options = parser.parse_args()
    configs = json.loads(_CONFIGS.read_text(encoding="utf-8"))["models"]
    configs = {name: configs[name] for name in _MODELS}
    try:
        plans = {name: plan(config, [options.tokens], list(_ENGINES.values())) for name, config in configs.items()}
        answer = ask(options.python, configs, options.tokens)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"planners: {error}", file=sys.stderr)
        return 2
    tools = {name: found for name, found in answer["tools"].items() if found is not None}
    versions = [f"{name} {found['version']}" for name, found in tools.items()]
    print(f"{options.tokens:,} tokens; Python {platform.python_version()}, sinkcache {__version__}")
    print(f"theirs: Python {answer['python']}, {', '.join(versions) or 'none installed'}")
    for name in (each for each in answer["tools"] if each not in tools):
        print(f"skipped: {name} is not installed there, `pip install {name}`")
    print_ours(plans)
    if tools:
        print_theirs(plans, tools)
    return 0


def ask(python: str, configs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What the tools of the other environment say of `configs`."""
    job = json.dumps({"configs": configs, "tokens": tokens})
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [python, "-c", _PEER]
    done = subprocess.run(command, input=job, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def print_ours(plans: dict[str, Plan]) -> None:
    """Bytes of one conversation in each engine."""
    print(f"\n| model | queries can see | {' | '.join(_ENGINES)} |\n|---|{'---:|' * (1 + len(_ENGINES))}")
    for name, made in plans.items():
        cells = ["-" if row.refused is not None else f"{row.held[0]:,}" for row in made.engines]
        print(f"| {name} | {made.least[0]:,} | {' | '.join(cells)} |")


def print_theirs(plans: dict[str, Plan], tools: dict[str, Any]) -> None:
    """What the others say, in MiB, and the difference."""
    print(f"\n| model, MiB | queries can see | {' | '.join(tools)} |\n|---|{'---:|' * (1 + len(tools))}")
    for name, made in plans.items():
        cells = [_against(made, found["answers"][name]) for found in tools.values()]
        print(f"| {name} | {made.least[0] / _MIB:,.2f} | {' | '.join(cells)} |")


def _against(made: Plan, said: Any) -> str:
    """Their bytes, the difference to ours, and the engines that hold as many."""
    if isinstance(said, str):
        return textwrap.shorten(said.replace("|", "/"), 70, placeholder=" ...")
    least = made.least[0]
    figures = zip(_ENGINES, made.engines, strict=True)
    same = [name for name, row in figures if row.refused is None and row.held[0] == said]
    if said == least:
        return f"{said / _MIB:,.2f} (exact)"
    return f"{said / _MIB:,.2f} ({said / least - 1:+.2%}{', = ' + same[0] if same else ''})"


if __name__ == "__main__":
    sys.exit(main())
