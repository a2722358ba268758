"""Under transformers' flash attention code: what it makes of the masks that the cache hands over.

No kernel runs here: transformers' own code unpads rows, counts their lengths and calls the two functions below, which
are attention written out, in place of those of the flash-attn package. What is tested is that slots and masks mean to
that code what they mean to sdpa, and that layers are shown of its attention what they are shown of sdpa's.
"""

import copy
import sys
import warnings
from typing import Any

import jaxtyping
import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
import zoo
from conftest import VOCABULARY, build
from einops import repeat
from test_padding import alone, batch, holed, read
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward

from sinkcache import Policy, SinkCache
from sinkcache.attention import reveal
from sinkcache.bounded import BoundedLayer
from sinkcache.flash import Columns, is_flash, show, shows
from sinkcache.guard import cache_argument, show_all_to
from sinkcache.observe import Kernel
from sinkcache.onlooker import Onlooker
from sinkcache.policies import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, SnapKV, StreamingLLM
from sinkcache.policy import Watch
from sinkcache.recording import record

BUDGET, SINKS = 9, 3
NAME = "flash_attention_2"
POLICIES = {
    "H2O": H2O(2),
    "H2O, decaying, greatest of a group": H2O(2, half_life=5, group="max"),
    "TOVA": TOVA(),
    "SnapKV": SnapKV(4, kernel=3),
    "ExpectedAttention": ExpectedAttention(horizon=8, num_sinks=2),
    "KeyDiff": KeyDiff(),
    "AdaKV of SnapKV": AdaKV(SnapKV(4, kernel=3), floor=0.2),
    "AdaKV of H2O": AdaKV(H2O(2), floor=0.2),
    "AdaKV of KeyDiff": AdaKV(KeyDiff(), floor=0.2),
}
ONE_SHOT, CHUNKS = [30] + [1] * 20, [9, 9, 9, 3, 1, 1, 1, 6, 11]  # a prompt longer than the budget; in pieces


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[q_len, heads, head_dim]` of one row; queries stand at the end of the keys, as in the kernel."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (repeat(each, "k h d -> k (h g) d", g=group) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    scores = scores if softcap == 0 else (scores / softcap).tanh() * softcap
    place = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
    other = torch.arange(len(keys))[None]
    hidden = (other > place) & causal | ((other < place - window) if window >= 0 else torch.tensor(False))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, repeat(sinks, "h -> h q 1", q=len(queries))], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : len(keys)]
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
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    scale = softmax_scale or q.shape[-1] ** -0.5
    given = scale, causal, window_size[0], softcap, s_aux
    return torch.stack([attention(*row, *given) for row in zip(q, k, v, strict=True)])


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
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    scale, queries, keys = softmax_scale or q.shape[-1] ** -0.5, cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows, given = zip(queries, queries[1:], keys, keys[1:], strict=False), (causal, window_size[0], softcap, s_aux)
    return torch.cat([attention(q[a:b], k[c:d], v[c:d], scale, *given) for a, b, c, d in rows])


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
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, flash_attention_forward)  # and again afterwards

    def use(model: Any) -> Any:
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
                module.config._attn_implementation_internal = NAME
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


# layers that are shown the attention


@pytest.fixture
def kernel_calls(monkeypatch):
    """The number of queries in each call of the kernel so far, of each row by itself."""
    plain, calls = attention, []

    def counted(queries: Tensor, *arguments: Any) -> Tensor:
        calls.append(len(queries))
        return plain(queries, *arguments)

    monkeypatch.setattr(sys.modules[__name__], "attention", counted)
    return calls


def bounded(cache: SinkCache) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, BoundedLayer)]


def agree(
    models: tuple[Any, Any],
    policy: Policy,
    told: tuple[Tensor, Tensor],
    chunks: list[int],
    off: float = 1e-9,
    **named: Any,
) -> None:
    """Two models, the second under flash attention, keep the same of the tokens they are told and say the same."""
    caches = [SinkCache(model, policy, **{"budget": BUDGET, **named}) for model in models]
    expected, got = (read(model, cache, *told, chunks) for model, cache in zip(models, caches, strict=True))
    assert models[1].config._attn_implementation == NAME
    for here, there in zip(*map(bounded, caches), strict=True):
        assert torch.equal(there.kept(), here.kept())
    real = told[1].bool()
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=off)


@pytest.mark.parametrize("chunks", [ONE_SHOT, CHUNKS], ids=["one shot", "chunks"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_what_is_kept_under_flash_attention_is_what_is_kept_under_sdpa(flashing, policy, chunks):
    agree((build("llama"), flashing(build("llama"))), policy, batch((0, 0)), chunks)


@pytest.mark.parametrize(
    ("family", "policy"),
    [("gemma3", "H2O"), ("gemma3", "AdaKV of H2O"), ("gemma3", "SnapKV"), ("qwen3", "TOVA"), ("gpt_neox", "H2O")],
)
def test_other_families_keep_the_same_at_positions_inside_the_cache(flashing, family, policy):
    models = build(family), flashing(build(family))
    agree(models, POLICIES[policy], batch((0, 0)), [21, 1, 1, 1, 7, 1, 18], positions="cache")


@pytest.mark.parametrize("given", [batch, holed], ids=["padded on the left", "with holes"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_padded_rows_keep_under_flash_attention_what_they_keep_under_sdpa(flashing, policy, given):
    chunks = ONE_SHOT if given is batch else CHUNKS
    agree((build("llama"), flashing(build("llama"))), policy, given(), chunks)


@pytest.mark.parametrize("policy", ["H2O, decaying, greatest of a group", "TOVA"])
def test_holes_read_token_by_token_are_the_same(flashing, policy):
    agree((build("llama"), flashing(build("llama"))), POLICIES[policy], holed(), [1] * 50)


@pytest.mark.parametrize("policy", ["H2O", "TOVA", "SnapKV", "AdaKV of H2O"])
def test_layers_of_other_budgets_keep_the_same(flashing, policy):
    models = build("llama"), flashing(build("llama"))
    for chunks in ([30, 1, 1, 1], [9, 9, 14, 1]):
        agree(models, POLICIES[policy], batch((0, 0), 33), chunks, budget=[8, 14])


@pytest.mark.parametrize("given", [(0, 0), (0, 3, 7)], ids=["without pads", "padded on the left"])
@pytest.mark.parametrize("policy", ["H2O", "TOVA", "SnapKV", "ExpectedAttention", "AdaKV of H2O"])
def test_a_prompt_longer_than_a_window_that_is_bounded_keeps_the_same(flashing, policy, given):
    models = build("gemma3"), flashing(build("gemma3"))
    agree(models, POLICIES[policy], batch(given, 40), [30, 1, 1, 5, 3], budget=8, sliding="bound")


@pytest.mark.parametrize("pads", [0, 40])
def test_sums_over_blocks_of_queries_are_those_over_all(flashing, pads):
    columns = 290  # two blocks and a part of one
    models = tuple(build("llama", max_position_embeddings=512) for _ in range(2))
    agree((models[0], flashing(models[1])), H2O(8, half_life=60), batch((0, pads), columns), [280, 10], budget=64)


def test_no_mask_of_all_queries_is_made(monkeypatch):
    asked, whole = [], Columns.mask

    def noted(self: Columns, *arguments: Any) -> Tensor:
        asked.append(whole(self, *arguments))
        return asked[-1]

    monkeypatch.setattr(Columns, "mask", noted)
    queries, keys = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 310, 8)
    real = torch.ones(2, 310)
    real[1, :20] = 0
    received = Columns(real).received(queries, keys, Kernel(0.3), real[:, 10:])  # pads do not count
    assert [each.shape[2] for each in asked] == [128, 128, 44]
    torch.testing.assert_close(received[0], Columns(None).received(queries[:1], keys[:1], Kernel(0.3))[0])
    torch.testing.assert_close(received[1].sum(-1), torch.full((2,), 290.0))
    assert received[1, :, :20].eq(0).all()


@pytest.mark.parametrize("label", ["GPT-OSS", "Gemma 2"])
@pytest.mark.parametrize("policy", ["H2O", "TOVA", "SnapKV"])
def test_learned_sinks_and_soft_caps_are_in_what_is_shown(flashing, label, policy):
    models = []
    for use in (lambda model: model, flashing):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what transformers says about its own odd families
            model: Any = zoo.build(label)
        if isinstance(model, str):
            pytest.skip(model)
        torch.manual_seed(3)
        for module in zoo.attention_modules(model):
            if label == "Gemma 2":
                module.attn_logit_softcapping = 0.5  # type: ignore[assignment]
            else:
                module.sinks.data.normal_(std=3)  # type: ignore[union-attr]
        model.set_attn_implementation("eager")  # sdpa has neither
        models.append(use(model))
    tokens, off = zoo.tokens(40, 2), 1e-5  # both have norms in float32
    agree((models[0], models[1]), POLICIES[policy], (tokens, torch.ones_like(tokens)), [20, 1, 1, 9, 9], off)


@pytest.mark.parametrize("policy", ["H2O", "TOVA", "SnapKV", "ExpectedAttention"])
def test_the_output_of_every_step_is_that_of_the_flash_kernel(flashing, kernel_calls, policy):
    tiny = flashing(build("llama"))
    cache = SinkCache(tiny, POLICIES[policy], BUDGET)
    kernel_calls.clear()
    tokens, mask = batch((0,), 30)
    read(tiny, cache, tokens, mask, [20, 1, 1, 8])
    assert kernel_calls == [20, 20, 1, 1, 1, 1, 8, 8]


def test_heads_of_different_length_attend_by_blocks_once_they_differ(flashing, kernel_calls):
    tiny = flashing(build("llama"))
    cache = SinkCache(tiny, POLICIES["AdaKV of H2O"], BUDGET)
    kernel_calls.clear()
    tokens, mask = batch((0,), 30)
    read(tiny, cache, tokens, mask, [4, 4, 20, 2])
    assert kernel_calls == [4, 4, 4, 4, 20, 20]  # after which the first tokens were evicted


def test_a_pass_without_our_cache_is_the_plain_one(flashing, kernel_calls):
    tiny, other = flashing(build("llama")), flashing(build("llama", seed=1))
    tokens, _ = batch((0,), 12)
    with torch.no_grad():
        expected = [model(input_ids=tokens).logits for model in (tiny, other)]
        SinkCache(tiny, H2O(2), BUDGET)
        kernel_calls.clear()
        for model, logits in zip((tiny, other), expected, strict=True):
            assert torch.equal(model(input_ids=tokens).logits, logits)
    assert kernel_calls == [12] * 4


def test_another_models_flash_attention_compiles_without_a_break(flashing, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users do not run under it, and it breaks graphs
    monkeypatch.setitem(
        AttentionInterface._global_mapping, NAME, lambda module, query, *rest, **more: (query * 2, None)
    )
    show(torch.nn.Linear(2, 2), NAME, lambda *given, **more: pytest.fail("nobody waits"))
    module, states = torch.nn.Linear(2, 2), torch.randn(1, 1, 3, 4)
    function = AttentionInterface()[NAME]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda query: function(module, query, query, query, None)[0], backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(states), states * 2)
    torch._dynamo.reset()


def test_flash_attention_is_wrapped_once_however_many_caches_there_are(flashing):
    tiny = flashing(build("llama"))
    SinkCache(tiny, KeyDiff(), BUDGET)
    assert AttentionInterface()[NAME] is flash_attention_forward  # nobody asked to be shown
    caches = [SinkCache(model, H2O(2), BUDGET) for model in (tiny, tiny, copy.deepcopy(tiny), flashing(build("qwen3")))]
    assert len(caches) == 4
    assert AttentionInterface()[NAME].args[0] is flash_attention_forward  # type: ignore[attr-defined]


def test_a_copy_of_a_model_is_shown_its_own_attention(flashing):
    tiny = flashing(build("llama"))
    SinkCache(tiny, H2O(2), BUDGET)
    agree((build("llama"), copy.deepcopy(tiny)), H2O(2), batch((0, 0)), [20, 1, 1, 28])


def test_flash_attention_that_is_registered_anew_is_an_error_until_a_cache_is_made(flashing):
    tiny, (tokens, mask) = flashing(build("llama")), batch((0,), 12)
    cache = SinkCache(tiny, H2O(2), BUDGET)
    AttentionInterface.register(NAME, flash_attention_forward)
    assert not shows(NAME)
    with pytest.raises(ValueError, match="set back to flash_attention_2: make the cache anew"):
        read(tiny, cache, tokens, mask, [12])
    again = SinkCache(tiny, H2O(2), BUDGET)
    read(tiny, again, tokens, mask, [12])
    read(tiny, cache, tokens, mask, [12])
    assert torch.equal(cache.kept(0), again.kept(0))


def test_flash_attention_is_told_by_its_name():
    assert [is_flash(name) for name in (NAME, "sdpa", "flash_of_nobody", f"paged|{NAME}")] == [
        True,
        False,
        False,
        False,
    ]


def test_flash_attention_that_no_layer_goes_by_is_refused(flashing, monkeypatch):
    tiny = flashing(build("llama"))
    local = AttentionInterface()
    local[NAME] = flash_attention_forward
    monkeypatch.setattr("transformers.models.llama.modeling_llama.ALL_ATTENTION_FUNCTIONS", local)
    with pytest.raises(ValueError, match="cannot be shown that of LlamaForCausalLM"):
        SinkCache(tiny, H2O(2), BUDGET)


def test_flash_attention_that_computes_something_else_is_refused(flashing, monkeypatch):
    tiny = flashing(build("llama"))
    plain = attention

    def squared(queries: Tensor, *arguments: Any) -> Tensor:
        return plain(queries, *arguments).square()

    monkeypatch.setattr(sys.modules[__name__], "attention", squared)
    with pytest.raises(ValueError, match="not softmax of scaled products"):
        SinkCache(tiny, H2O(2), BUDGET)


def test_a_text_is_recorded_under_flash_attention_as_under_sdpa(flashing):
    tokens = batch((0,), 30)[0]
    plain, other = build("llama"), flashing(build("llama"))
    one, two = (record(model, tokens, chunk=7) for model in (plain, other))
    for layer, blocks in one.received.items():
        for here, there in zip(blocks, two.received[layer], strict=True):
            torch.testing.assert_close(there, here)


def test_an_onlooker_is_given_the_mask_that_sdpa_would_have_had(flashing):
    class Looking(Onlooker):
        watch = Watch(queries=True)

        def look(self, module: Any, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
            seen.append(mask)

    masks = []
    for model in (build("gemma3"), flashing(build("gemma3"))):
        seen: list[Tensor | None] = []
        reveal(model)
        show_all_to(Looking())
        try:
            model(input_ids=batch((0,), 30)[0], use_cache=False)
        finally:
            show_all_to(None)
        masks.append(seen)
    for here, there in zip(*masks, strict=True):
        assert here is there if here is None or there is None else torch.equal(here, there)


def test_generate_says_under_flash_attention_what_it_says_under_sdpa(flashing):
    tokens, mask = batch(columns=30)
    for policy in (H2O(2), AdaKV(SnapKV(4, kernel=3))):
        said = []
        for model in (build("llama"), flashing(build("llama"))):
            given = {cache_argument(model): SinkCache(model, policy, BUDGET), "attention_mask": mask}
            said.append(model.generate(tokens, max_new_tokens=12, do_sample=False, **given).tolist())  # type: ignore[operator]
        assert said[0] == said[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("pads", [0, 50], ids=["without pads", "padded on the left"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_the_real_kernel_keeps_what_sdpa_keeps(policy, pads):
    pytest.importorskip("flash_attn")
    tokens, mask = batch((0, pads), 300)
    tokens, mask, real = tokens.cuda(), mask.cuda(), mask.bool()
    logits, kept = [], []
    for implementation in ("sdpa", NAME):
        model: Any = build("llama", torch.bfloat16, initializer_range=0.1, max_position_embeddings=512).to("cuda")
        model.set_attn_implementation(implementation)
        cache = SinkCache(model, policy, 64)
        logits.append(read(model, cache, tokens, mask, [250, *[1] * 30, 20]).float().cpu()[real])
        kept.append([layer.kept() for layer in bounded(cache)])
    assert float((logits[0] - logits[1]).norm()) <= 0.1 * float(logits[0].norm())  # bfloat16, and a token or two
    for here, there in zip(*kept, strict=True):
        found = (here[..., :, None] == there[..., None, :]).any(-1)
        assert float(found.float().mean()) >= 0.9
