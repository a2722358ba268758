"""What users reported of scores made of attention, as claims: groups of heads, sums, ages, sdpa, sinks, late hits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jaxtyping
import numpy as np
import pytest
import score_oracle as oracle
import torch
from conftest import VOCABULARY, build
from jaxtyping import Float
from test_scored import Reader, held
from torch import Tensor

from sinkcache import SinkCache
from sinkcache.guard import cache_argument
from sinkcache.policies import (
    H2O,
    RKV,
    TOVA,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    LagKV,
    Phases,
    Protect,
    Random,
    SnapKV,
    StreamingLLM,
)
from sinkcache.policy import Entries, Policy, Watch

Array = np.ndarray[Any, Any]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off the checking of types, which takes most of the time of thousands of steps."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def tokens(length: int, batch: int = 1, seed: int = 31) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def step(model: Any, cache: SinkCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}).logits


def attention_of(ids: Tensor, **changes: Any) -> list[Array]:
    """Of each layer the probabilities `[num_heads, q_len, kv_len]` of the model that evicts nothing."""
    tiny: Any = build("llama", **changes)
    tiny.set_attn_implementation("eager")
    with torch.no_grad():
        return [each[0].numpy() for each in tiny(input_ids=ids, output_attentions=True).attentions]


def one_text(length: int, seed: int = 0, heads: int = 4) -> oracle.Stream:
    """Random queries, keys and values, of `heads` on 2 key heads or one."""
    rng = np.random.default_rng(seed)
    Q, K, V = (rng.normal(size=(count, length, 6)) for count in (heads, (heads + 1) // 2, (heads + 1) // 2))
    return oracle.new_stream(Q, K, V)


class Text(Reader):
    """Reads one row, however long, at the same cost a step."""

    def __init__(self, policy: Policy, budget: int, text: oracle.Stream) -> None:
        super().__init__(policy, budget, [text], [0])
        self.states = {name: torch.from_numpy(getattr(text, name))[None] for name in "QKV"}

    def _columns(self, name: str, columns: Tensor) -> Tensor:
        return self.states[name][:, :, columns]


# D1

SOFT: dict[str, Any] = {"initializer_range": 0.15}  # attention is not all on one token, so that a mean is not a maximum


@pytest.mark.parametrize(("group", "merge"), [("mean", np.mean), ("max", np.max)])
def test_query_heads_of_a_group_choose_by_their_mean_or_greatest(group: Any, merge: Callable[..., Array]) -> None:
    ids, tiny, chosen = tokens(24), build("llama", **SOFT), []
    for policy in (SnapKV(4, pooling="none", group=group), H2O(recent=4, group=group)):
        cache = SinkCache(tiny, policy, 9)
        step(tiny, cache, ids)
        for index, layer in enumerate(attention_of(ids, **SOFT)):
            queries = slice(20, 24) if isinstance(policy, SnapKV) else slice(0, 24)
            scores = merge(layer.reshape(2, 2, 24, 24), axis=1)[:, queries, :20].sum(axis=1)
            best = [[*sorted(row.argsort()[-5:].tolist()), 20, 21, 22, 23] for row in scores]
            assert cache.kept(index)[0].tolist() == best
            chosen.append(best[0] != best[1])
    assert any(chosen)


def test_the_mean_of_a_group_and_its_greatest_are_two_choices() -> None:
    tiny, kept = build("llama", **SOFT), []
    for group in ("mean", "max"):
        cache = SinkCache(tiny, SnapKV(4, pooling="none", group=group), 9)
        step(tiny, cache, tokens(24))
        kept.append(torch.stack([cache.kept(index) for index in range(2)]))
    assert not torch.equal(*kept)


# S1


@dataclass(frozen=True)
class Noted(Policy):
    """Keeps the newest, and notes what `policy` would score."""

    policy: Policy
    notes: Any

    def watch(self) -> Watch:
        return self.policy.watch()

    def score(self, entries: Entries) -> Float[Tensor, "batch num_kv_heads kv_len"]:
        order = entries.positions.argsort(dim=-1)
        self.notes.append((entries.positions.gather(-1, order), self.policy.score(entries).gather(-1, order)))
        return entries.positions.double()


def test_h2o_scores_are_column_sums_of_causal_attention() -> None:
    text, notes = one_text(12, heads=1), []
    logits = text.Q[0] @ text.K[0].T / np.sqrt(6)
    logits[np.triu_indices(12, 1)] = -np.inf
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    sums = (probabilities / probabilities.sum(axis=1, keepdims=True)).sum(axis=0)
    Text(Noted(H2O(recent=0), notes), 11, text).read(12)
    np.testing.assert_allclose(notes[0][1][0, 0].numpy(), sums, rtol=0, atol=1e-10)


def test_h2o_scores_in_a_model_are_column_sums_of_what_it_attends_to() -> None:
    changes: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1}
    ids, notes = tokens(12), []
    tiny = build("llama", **changes)
    step(tiny, SinkCache(tiny, Noted(H2O(recent=0), notes), 11), ids)
    assert len(notes) == 2
    for (_, scores), layer in zip(notes, attention_of(ids, **changes), strict=True):
        np.testing.assert_allclose(
            scores[0, 0].numpy(), layer[0].sum(axis=0), rtol=0, atol=2e-6
        )  # its softmax is float32


# S2


def test_the_newest_stay_over_100_steps_and_what_was_not_in_the_prompt_can_become_heavy() -> None:
    tiny, ids = build("llama"), tokens(116)
    ids[0, 40::3] = 50  # a token that comes again and again
    cache = SinkCache(tiny, H2O(recent=4), 16)
    step(tiny, cache, ids[:, :16])
    sets, heavy = [], set()
    for end in range(17, 117):
        step(tiny, cache, ids[:, end - 1 : end])
        kept = [cache.kept(index)[0] for index in range(2)]
        assert all(layer[:, -4:].tolist() == [list(range(end - 4, end))] * 2 for layer in kept)
        heavy |= {position for layer in kept for position in layer[:, :-4].flatten().tolist() if position >= 16}
        sets.append({tuple(head) for layer in kept for head in layer[:, :-4].tolist()})
    late = cache.kept(0)[0, :, :-4].flatten().tolist() + cache.kept(1)[0, :, :-4].flatten().tolist()
    assert any(position >= 16 for position in late)
    assert any(ids[0, position] == 50 for position in heavy)
    assert sets[0] != sets[42] != sets[-1]


# S3


def kendall(scores: list[float]) -> float:
    """Of the scores of tokens, the newest first: 1 if every older token has more, -1 if every older one has less."""
    pairs = [(one, other) for index, one in enumerate(scores) for other in scores[index + 1 :]]
    return sum(np.sign(other - one) for one, other in pairs) / len(pairs)


@pytest.mark.parametrize(
    ("policy", "biased"),
    [
        (H2O(recent=0), True),
        (H2O(recent=0, reduce="mean"), False),
        (H2O(recent=0, half_life=5), False),
        (H2O(recent=0, half_life=20, reduce="mean"), False),
    ],
    ids=["sum", "mean", "decay", "decayed-mean"],
)
@pytest.mark.usefixtures("unchecked")
def test_sums_favour_the_old_and_means_and_decay_do_not(policy: H2O, biased: bool) -> None:
    found = []
    for seed in range(3):
        text, notes = one_text(300, seed), []
        reader = Text(Noted(policy, notes), 65, text)  # keeps the newest 65, so that attention is stationary
        for _ in range(300):
            reader.read(1)
        grown = 25 if policy.half_life == 5 and policy.reduce == "sum" else 1  # five half-lives make 97% of a sum
        found += [kendall(head[::-1][grown:]) for head in notes[-1][1][0].tolist()]
    mean = sum(found) / len(found)
    assert mean > 0.6 if biased else abs(mean) < 0.12, found


# S4


def test_h2o_under_sdpa_keeps_what_it_keeps_under_eager_attention() -> None:
    ids, logits, kept = tokens(60, batch=2), [], []
    for implementation in ("sdpa", "eager"):
        tiny: Any = build("llama")
        tiny.set_attn_implementation(implementation)
        cache = SinkCache(tiny, H2O(recent=4), 16)
        logits.append(torch.cat([step(tiny, cache, piece) for piece in ids.split([25, 1, 1, 6, *[1] * 27], dim=1)], 1))
        kept.append(torch.stack([cache.kept(index) for index in range(2)]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)
    assert torch.equal(*kept)
    assert (kept[0][..., 0] < 44).any()  # more than the newest


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_tokens_receive_is_all_that_queries_pay_and_never_zeros(implementation: str) -> None:
    tiny: Any = build("llama")
    tiny.set_attn_implementation(implementation)
    cache = SinkCache(tiny, H2O(recent=4), 16)
    for piece in tokens(15, batch=2).split([9, 1, 1, 4], dim=1):
        step(tiny, cache, piece)
        for layer in cache.layers:
            received: Tensor = layer.fields["mass"]  # type: ignore[union-attr]
            torch.testing.assert_close(received.sum(-1), torch.full((2, 2), float(cache.seen), dtype=torch.float64))


# S5


@pytest.mark.parametrize(
    "policy",
    [Phases(SnapKV(4, 3), KeyDiff()), Protect(Protect(KeyDiff(), 1, 2), 2, 4), Phases(Protect(Knorm(), 1, 2), H2O(4))],
    ids=["phases", "protect", "both"],
)
def test_two_policies_share_one_budget(policy: Policy) -> None:
    tiny = build("llama")
    for budget in (0.5, 20):
        cache = SinkCache(tiny, policy, budget)
        step(tiny, cache, tokens(40))
        for piece in tokens(24).split([*[1] * 10, 5, *[1] * 9], dim=1):
            assert [cache.kept(index).shape for index in range(2)] == [(1, 2, 20)] * 2
            step(tiny, cache, piece)


# sinks for ever, and hits that come late

PROTECTING: list[tuple[Policy, Policy | None]] = [
    (H2O(recent=4, num_sinks=3), H2O(recent=4)),
    (H2O(recent=4, num_sinks=3, half_life=20, reduce="mean"), H2O(recent=4, half_life=20, reduce="mean")),
    (TOVA(num_sinks=3), TOVA()),
    (SnapKV(4, 3, num_sinks=3), SnapKV(4, 3)),
    (ExpectedAttention(8, num_sinks=3), ExpectedAttention(8, num_sinks=0)),
    (KeyDiff(num_sinks=3), KeyDiff()),
    (Knorm(num_sinks=3), Knorm()),
    (LagKV(num_sinks=3, lag=4), LagKV(num_sinks=0, lag=4)),
    (RKV(4, 3, num_sinks=3), RKV(4, 3)),
    (StreamingLLM(3), StreamingLLM(0)),
    (Protect(Random(), num_sinks=3, recent=2), Random()),
    (Phases(KeyDiff(num_sinks=3), H2O(recent=2, num_sinks=3)), None),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("decoded", [1_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("policy", "without"), PROTECTING, ids=[repr(case[0]) for case in PROTECTING])
def test_sinks_are_held_to_the_end_of_decoding(policy: Policy, without: Policy | None, decoded: int) -> None:
    def read(policy: Policy, steps: int) -> list[list[int]]:
        text = one_text(steps + 20)
        text.Q[:, :, 0], text.K[:, :3, 0] = 2.0, -4.0  # nobody attends to the first three, whose keys are long
        text.K[:, 3:, 1] += 1.0
        text.K[:, :3, 1] = 3.0
        reader = Text(policy, 16, text)
        reader.read(20)
        for _ in range(steps):
            reader.read(1)
        return held(reader.layer, 0)

    assert [head[:3] for head in read(policy, decoded)] == [[0, 1, 2]] * 2
    assert without is None or any(head[:3] != [0, 1, 2] for head in read(without, 500))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "policy", [H2O(recent=8), H2O(recent=4, half_life=10), TOVA(), TOVA(per="head"), SnapKV(4, 3)], ids=repr
)
def test_a_late_heavy_hitter_is_kept(policy: Policy) -> None:
    text, late = one_text(200), 90
    text.Q[:, :, 0], text.K[:, :, 0] = 3.0, 0.0
    text.K[:, late, 0] = 6.0  # every query after it attends to it
    reader = Text(policy, 16, text)
    reader.read(20)
    for end in range(21, 201):
        reader.read(1)
        assert all((late in head) == (end > late) for head in held(reader.layer, 0))
