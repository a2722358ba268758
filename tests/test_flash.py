"""Under transformers' flash attention code: what it makes of the masks that the cache hands over.

No kernel runs here: transformers' own code unpads rows, counts their lengths and calls the two functions below, which
are attention written out, in place of those of the flash-attn package. What is tested is that slots and masks mean to
that code what they mean to sdpa.
"""

from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from conftest import VOCABULARY, build
from einops import repeat
from test_padding import alone, batch, holed, read
from torch import Tensor

from sinkcache import SinkCache
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM

BUDGET, SINKS = 9, 3


def attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool, window: int) -> Tensor:
    """`[q_len, heads, head_dim]` of one row; queries stand at the end of the keys, as in the kernel."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (repeat(each, "k h d -> k (h g) d", g=group) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    place = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
    other = torch.arange(len(keys))[None]
    hidden = (other > place) & causal | ((other < place - window) if window >= 0 else torch.tensor(False))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values)


Window = tuple[int, int]  # transformers looks at the names of a kernel's arguments to see what it can do


def of_equal_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
) -> Tensor:
    scale = softmax_scale or q.shape[-1] ** -0.5
    return torch.stack([attention(*row, scale, causal, window_size[0]) for row in zip(q, k, v, strict=True)])


def of_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
) -> Tensor:
    scale, queries, keys = softmax_scale or q.shape[-1] ** -0.5, cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows = zip(queries, queries[1:], keys, keys[1:], strict=False)
    return torch.cat([attention(q[a:b], k[c:d], v[c:d], scale, causal, window_size[0]) for a, b, c, d in rows])


@pytest.fixture
def flashing(monkeypatch):
    """`flashing(model)`: the model, attending through transformers' flash attention code."""
    if not hasattr(flash, "_lazy_imports"):
        pytest.skip("this transformers loads its kernels in another way")
    functions = (of_equal_lengths, of_lengths, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: functions)
    for name in ("_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn", "_loaded_implementation"):
        if hasattr(flash, name):
            monkeypatch.setattr(flash, name, None)

    def use(model: Any) -> Any:
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
                module.config._attn_implementation_internal = "flash_attention_2"
        return model

    return use


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma3"])
def test_flash_attention_reads_the_slots_as_sdpa_does(flashing, family, positions):
    tokens = torch.randint(1, VOCABULARY, (2, 50), generator=torch.Generator().manual_seed(5))
    mask, chunks = torch.ones_like(tokens), [21, 1, 1, 1, 7, 1, 18]
    plain = build(family)
    expected = read(plain, SinkCache(plain, StreamingLLM(SINKS), BUDGET, positions), tokens, mask, chunks)
    other = flashing(build(family))
    got = read(other, SinkCache(other, StreamingLLM(SINKS), BUDGET, positions), tokens, mask, chunks)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("given", [batch, holed], ids=["padded on the left", "with holes"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_flash_attention_unpads_the_slots_of_each_row(flashing, family, given):
    tiny, (tokens, mask) = flashing(build(family)), given()
    chunks = [9, 9, 9, 3, 1, 1, 1, 6, 11]
    logits = read(tiny, SinkCache(tiny, StreamingLLM(SINKS), BUDGET), tokens, mask, chunks)
    for row in range(len(tokens)):
        real = mask[row].bool()
        one = SinkCache(tiny, StreamingLLM(SINKS), BUDGET)
        own, ones = tokens[row : row + 1, real], torch.ones(1, int(real.sum()), dtype=torch.int64)
        expected = read(tiny, one, own, ones, alone(mask[row], chunks))
        torch.testing.assert_close(logits[row, real], expected[0], rtol=0, atol=1e-9)


def test_flash_attention_generates_what_sdpa_does_from_a_padded_batch(flashing):
    tokens, mask = batch(columns=30)
    plain, other = build("llama"), flashing(build("llama"))
    said = []
    for model in (plain, other):
        given = {cache_argument(model): SinkCache(model, StreamingLLM(SINKS), BUDGET), "attention_mask": mask}
        said.append(model.generate(tokens, max_new_tokens=20, do_sample=False, **given).tolist())  # type: ignore[operator]
    assert said[0] == said[1]
