"""lm-evaluation-harness through a bounded cache: its model "sinkcache", which runs any of its tasks with any policy.

`python -m sinkcache.harness --model_args "pretrained=NAME,policy=H2O(recent=64),budget=1024" --tasks ...` is the
harness's own command line with this model in it: it looks at no entry points, and knows a model once it is imported.

How requests are read, each through a cache of its own, `chunk` tokens at a time, whatever the policy:
- log-likelihood of a continuation: the context but its last token is read and evicted; then that token and the
  continuation but its last, in one pass if they are no more than `chunk`: they see what is held, and those before
  them. An empty context is the prefix token, as with the harness's "hf".
- rolling log-likelihood: the same, of the whole text after the prefix token, so that each token is scored once.
- generation: the prompt but its last token is read and evicted, then `model.generate` goes on with that cache.

A budget that is a share is one of the context, of the whole text where it is rolling, of the prompt where it generates.

Where positions count within the cache nothing is ever cut. Elsewhere ("original", or no policy) a request that exceeds
the trained length loses tokens on the left, or is scored in windows where it is rolling, as "hf" has it; how many
tokens of how many requests were cut is logged, and in the results.

Differs from "hf": probabilities are in float32 at least, also of a bfloat16 model (`softmax_dtype` changes that);
requests are read one by one.
"""

import copy
import logging
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache

from sinkcache import __version__
from sinkcache.cache import SinkCache
from sinkcache.guard import cache_argument
from sinkcache.harness_options import check, device, embedded, in_tokens
from sinkcache.models import EMBEDDED
from sinkcache.plugins import named
from sinkcache.policy import Policy
from sinkcache.streaming import prefill, step

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval._cli.utils import key_val_to_dict
    from lm_eval.api.registry import register_model
    from lm_eval.models import huggingface
except ModuleNotFoundError as error:
    _missing = f'{(error.name or "").split(".")[0]} is not installed: run `pip install "sinkcache[lm-eval]"`'
    if __name__ != "__main__":
        raise ModuleNotFoundError(_missing, name=error.name) from error
    print("sinkcache:", _missing, file=sys.stderr)  # noqa: T201
    sys.exit(2)

_LOG = logging.getLogger(__name__)
_HFLM: Any = huggingface.HFLM  # whose decorator hides its type


class _Mistake(ValueError):
    """What a user asked for and cannot have, in one line."""


class SinkCacheLM(_HFLM):
    """A causal model of the harness that reads every request through a cache of its own, bounded by `policy`.

    `pretrained`: "smollm2-135m" (the embedded model), a folder, a hub id, or a model, which then needs a `tokenizer`.
    `policy`: a policy or its expression, "H2O(recent=64)"; "none" is the model's full cache, read by the same code.
    `budget`, `positions`: as of `SinkCache`, not to be given with "none". `chunk`: tokens read at once.
    `options`: those of the harness's HFLM that do not change how the cache is used.

    Raises ValueError for what is refused, with its reason, and as `SinkCache` and `sinkcache.models.load` do.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str | Policy | None = "StreamingLLM(num_sinks=4)",
        budget: int | float | list[int] | list[float] | None = None,
        positions: str | None = None,
        chunk: int = 512,
        batch_size: int | str | None = 1,
        **options: Any,
    ) -> None:
        check(chunk, batch_size, options)
        self.policy = None if policy in (None, "none") else named(policy) if isinstance(policy, str) else policy
        if self.policy is None and (budget is not None or positions is not None):
            raise ValueError('budget and positions are a policy\'s, got them with policy="none": leave them out')
        self.budget: Any = 1024 if budget is None and self.policy is not None else budget
        self.positions: Any = positions
        self.chunk, self.cut_requests, self.cut_tokens = chunk, 0, 0
        options["device"] = device(options.get("device"))
        if pretrained == EMBEDDED:
            pretrained = embedded(options)
        super().__init__(pretrained, backend="causal", batch_size=1, **options)
        if not isinstance(pretrained, str):
            self.pretrained = str(self.model.name_or_path)
        self._endless = False
        if isinstance(trial := self._cache(), SinkCache):  # refused now, if it must be
            self.positions = trial.positions
            self._endless = trial.positions == "cache" and trial.ledgers[0].books[0].limit is None

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "SinkCacheLM":
        """The model that `arg_string` asks for; commas and equals signs within brackets or quotes are a value's own."""
        return cls.create_from_arg_obj(key_val_to_dict(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict | None = None) -> "SinkCacheLM":
        """The model that `arg_dict` asks for, as the command line calls for it; raises a ValueError of one line."""
        given = {**arg_dict, **{name: value for name, value in (additional_config or {}).items() if value is not None}}
        try:
            return cls(**given)
        except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise _Mistake(" ".join(lines[0].split())) from error

    @property
    def max_length(self) -> int:
        """Tokens of a request that are read: all where positions count within the cache, else the trained length."""
        return sys.maxsize if self._endless and not self._max_length else super().max_length

    def get_model_info(self) -> dict:
        """What the harness records of a model, and under "sinkcache" how it was read."""
        how = {
            "version": __version__,
            "policy": "none" if self.policy is None else repr(self.policy),
            **{name: getattr(self, name) for name in ("budget", "positions", "chunk", "cut_requests", "cut_tokens")},
        }
        return {**super().get_model_info(), "sinkcache": how}

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool | None = False,
    ) -> tuple[Tensor, Tensor]:
        """The ids and the mask of prompts, cut on the left to `left_truncate_len` tokens, which is counted."""
        ids, mask = super().tok_batch_encode(list(strings), padding_side)
        if ids.shape[1] == 0:
            raise ValueError(f"a prompt must have at least one token to generate from, got {list(strings)!r}")
        cut = max(0, ids.shape[1] - (left_truncate_len or sys.maxsize))
        self._count_cut(cut)
        return ids[:, cut:], mask[:, cut:]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding says it) of each (strings, context ids, continuation ids)."""
        contexts = [self._fitting(context, continuation) for _, context, continuation in requests]
        longest_first = sorted(range(len(requests)), key=lambda index: (-len(contexts[index]), contexts[index]))
        answers: dict[int, tuple[float, bool]] = {}
        quiet = disable_tqdm or len(requests) == 1  # a window of a text
        with tqdm(total=len(requests), disable=quiet, desc="Running loglikelihood requests") as bar:
            for context, group in groupby(longest_first, key=contexts.__getitem__):
                *others, last = group
                strings, _, continuation = requests[last]
                cache = self._cache(len(context) + (0 if strings else len(continuation)))  # a rolling one has none
                self._read(cache, self._ids(context[:-1]))
                for index in (*others, last):
                    strings, _, continuation = requests[index]
                    mine = cache if index == last else _twin(cache)
                    answers[index] = self._score(mine, self._ids([context[-1], *continuation]))
                    if strings is not None:
                        self.cache_hook.add_partial("loglikelihood", strings, answers[index])
                    bar.update()
        return [answers[index] for index in range(len(requests))]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        cache = self._cache(context.shape[1])
        self._read(cache, context[:, :-1])
        if (beams := generation_kwargs.get("num_beams", 1)) > 1 and context.shape[1] > 1:
            cache.batch_repeat_interleave(beams)
        generation_kwargs[cache_argument(self.model)] = cache
        return super()._model_generate(context, max_length, stop, **generation_kwargs)

    def _cache(self, prompt: int | None = None) -> Cache:
        """An empty cache for a request whose prompt, of which a budget may be a share, has so many tokens."""
        if self.policy is None:
            return DynamicCache(config=self.model.config.get_text_config(decoder=True))
        budget = self.budget if prompt is None else in_tokens(self.budget, prompt)
        return SinkCache(self.model, self.policy, budget, self.positions)

    def _read(self, cache: Cache, input_ids: Int[Tensor, "1 q_len"]) -> None:
        if isinstance(cache, SinkCache) and input_ids.shape[1]:
            prefill(self.model, cache, input_ids, self.chunk)
        elif input_ids.shape[1]:
            for piece in input_ids.split(self.chunk, dim=1):
                step(self.model, cache, piece, last_only=True)

    def _score(self, cache: Cache, input_ids: Int[Tensor, "1 q_len"]) -> tuple[float, bool]:
        """The log-likelihood in nats of all of `input_ids` but the first, and whether each is the likeliest."""
        given, targets = input_ids[:, :-1].split(self.chunk, dim=1), input_ids[0, 1:].split(self.chunk)
        total, greedy = 0.0, True
        for piece, wanted in zip(given, targets, strict=True):
            logits = step(self.model, cache, piece)[0]
            dtype = self.softmax_dtype or torch.promote_types(logits.dtype, torch.float32)
            log = torch.log_softmax(logits, dim=-1, dtype=dtype)
            total += float(log.gather(-1, wanted[:, None]).double().sum())
            greedy = greedy and bool((logits.argmax(dim=-1) == wanted).all())
        return total, greedy

    def _ids(self, tokens: list[int]) -> Int[Tensor, "1 q_len"]:
        return torch.tensor([tokens], dtype=torch.long, device=self.device)

    def _fitting(self, context: list[int], continuation: list[int]) -> list[int]:
        """What is left of `context` where both must fit into `max_length`, the last token to be scored not counted."""
        if not context or not 0 < len(continuation) <= self.max_length:
            got = f"got {len(continuation)} after {len(context)}"
            raise ValueError(f"a continuation has at least 1 token, at most max_length, and follows 1 or more: {got}")
        cut = max(0, len(context) + len(continuation) - 1 - self.max_length)
        self._count_cut(cut)
        return context[cut:]

    def _count_cut(self, tokens: int) -> None:
        if tokens:
            self.cut_requests, self.cut_tokens = self.cut_requests + 1, self.cut_tokens + tokens
            _LOG.warning("cut %d tokens on the left of a request: at most %d are read", tokens, self.max_length)


register_model("sinkcache")(SinkCacheLM)  # as a decorator it would hide the type


def _twin(cache: Cache) -> Cache:
    return cache.fork() if isinstance(cache, SinkCache) else copy.deepcopy(cache)


def main() -> int:
    """The harness's command line, `--model sinkcache` unless another is named; returns the exit code."""
    if sys.argv[1:2] == ["run"]:
        del sys.argv[1]
    if sys.argv[1:2] not in (["ls"], ["validate"]):
        other = any(each.split("=")[0] in ("--model", "-M") for each in sys.argv)
        sys.argv[1:] = ["run", *([] if other or len(sys.argv) == 1 else ["--model", "sinkcache"]), *sys.argv[1:]]
    try:
        cli_evaluate()
    except _Mistake as error:
        print("sinkcache:", error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
