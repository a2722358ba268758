"""What the harness's model "sinkcache" takes beside a policy, and what it refuses, each with its reason."""

import math
import os
from typing import Any

import torch
from transformers import PreTrainedModel

from sinkcache.models import EMBEDDED, load

OWN = ("pretrained", "policy", "budget", "positions", "chunk")
PASSED = (  # to the harness's own HFLM, which loads the model
    "add_bos_token", "attn_implementation", "chat_template_args", "device", "dtype", "enable_thinking", "gguf_file",
    "max_length", "prefix_token_id", "revision", "softmax_dtype", "subfolder", "think_end_token", "tokenizer",
    "trust_remote_code", "use_fast_tokenizer",
)  # fmt: skip
_PLACED = "it runs in one process on one device; in Python, a model that is placed otherwise can be given as an object"
_CHANGED = "in Python, a model that was changed after loading can be given as an object"
_REFUSED = {
    "backend": "only causal models have a cache to bound",
    "truncation": "whether a request is cut follows from positions and max_length, and is always said",
    "logits_cache": "a context is always read once for all its continuations",
    "mixed_precision_dtype": "a cache holds one dtype: load the model in it, with dtype",
    "max_batch_size": "requests are read one by one",
    **dict.fromkeys(("parallelize", "device_map", "max_memory_per_gpu", "max_cpu_memory", "offload_folder"), _PLACED),
    "tp_plan": _PLACED,
    **dict.fromkeys(("peft", "delta", "autogptq", "gptqmodel"), _CHANGED),
}


def check(chunk: Any, batch_size: Any, options: dict[str, Any]) -> None:
    """Raises ValueError for what cannot be had."""
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk!r}")
    if str(batch_size) != "1":
        raise ValueError(f"batch_size must be 1, got {batch_size}: requests are read one by one, each by its own cache")
    for name in options:
        if name in _REFUSED:
            raise ValueError(f"{name} is not for this model: {_REFUSED[name]}")
        if name not in PASSED:
            raise ValueError(f"{name!r} is no argument of this model: it takes {', '.join((*OWN, *PASSED))}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{os.environ['WORLD_SIZE']} processes are not for this model: {_PLACED}")
    dtype = options.get("dtype", "auto")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f'dtype must be "auto" or one of torch, such as bfloat16, got {dtype!r}')


def device(name: str | None) -> str:
    """The device to use; the harness's own default, "cuda:0", is the CPU where there is no GPU, as with its "hf"."""
    if name in (None, "cuda", "cuda:0"):
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.empty(0, device=name).device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def embedded(options: dict[str, Any]) -> PreTrainedModel:
    """The embedded model; what it was loaded by leaves `options`, and its tokenizer goes there."""
    dtype = options.pop("dtype", "auto")
    dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for name in ("attn_implementation", "gguf_file", "subfolder", "trust_remote_code", "use_fast_tokenizer"):
        if name in options:
            raise ValueError(f"{name} is for a hub id or a folder, and {EMBEDDED!r} is none: leave {name} out")
    model, tokenizer = load(EMBEDDED, dtype, options.pop("revision", None), options["device"])
    options.setdefault("tokenizer", tokenizer)
    return model


def in_tokens(budget: Any, prompt: int) -> Any:
    """`budget` with shares of the prompt in tokens, which `prefill` would take of what it reads: one token less."""
    if isinstance(budget, (list, tuple)):
        return [in_tokens(each, prompt) for each in budget]
    return math.ceil(round(budget * prompt, 9)) if isinstance(budget, float) else budget
