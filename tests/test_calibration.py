"""Budgets by layer: what is missed against loops over transformers' own attention, and how tokens are shared out."""

import itertools
import math
from fractions import Fraction
from typing import Any

import jaxtyping
import pytest
import score_oracle as oracle
import torch
import transformers as tf
from conftest import VOCABULARY, build
from hypothesis import assume, given
from hypothesis import strategies as st
from test_recording import SCORERS, eager, tokens
from torch import Tensor

from sinkcache import SinkCache
from sinkcache.book import least_budget
from sinkcache.budgets import evened, scaled
from sinkcache.calibration import calibrate, missed, shared_out
from sinkcache.hearing import Heard, overhear
from sinkcache.policies import H2O, TOVA, AdaKV, Protect, SnapKV, StreamingLLM, Window
from sinkcache.policy import Policy

EXACT: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}  # eager attention's softmax is float32


@pytest.fixture
def unchecked(monkeypatch) -> None:
    """Turns off the checking of types that tests run under and users do not, so that the library's own errors show."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def missed_by_loops(model: Any, text: Tensor, scorer: oracle.Scorer, budget: int, chunk: int) -> list[float]:
    """By layer the squares of what transformers pays positions that numpy does not have a query see."""
    heard: dict[int, Heard] = {}
    overhear(model, text, text.shape[1], lambda each: heard.update({each.layer: each}))
    sums = []
    for layer, attention in enumerate(eager(model, text)):
        stream = oracle.new_stream(*(getattr(heard[layer], name)[0] for name in ("queries", "keys", "values")))
        oracle.library(stream, [len(each) for each in text[0].split(chunk)], budget, scorer)
        total = 0.0
        for head, rows in enumerate(attention.tolist()):
            for query, row in enumerate(rows):
                visible = stream.rows[head // 2][query]
                total += sum(row[at] ** 2 for at in range(4, query + 1) if at not in visible) / 2
        sums.append(total)
    return sums


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("chunk", [1, 5])
def test_what_is_missed_is_what_loops_over_the_full_attention_say(model, name: str, chunk: int) -> None:
    network, text, (policy, scorer) = model("llama"), tokens(43), SCORERS[name]
    got = missed(network, text, policy, [9, 16, 43], chunk)
    expected = [missed_by_loops(network, text, scorer, budget, chunk) for budget in (9, 16)]
    torch.testing.assert_close(got[:, :2].T.contiguous(), torch.tensor(expected, dtype=torch.float64), **EXACT)
    assert got[:, 2].tolist() == [0.0, 0.0]
    assert bool((got[:, 0] > got[:, 1]).all())


def test_heads_that_compete_are_measured_by_what_they_hold(model) -> None:
    network, text = model("llama"), tokens(43)
    alike, competing = (missed(network, text, policy, [9], 5) for policy in (TOVA("head"), AdaKV(TOVA("head"))))
    assert not torch.equal(alike, competing)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(alike, competing)


@pytest.mark.parametrize(
    ("policy", "budget", "least"),
    [(StreamingLLM(4), 16, 5), (H2O(recent=8, half_life=9), 16, 9), (SnapKV(4, recent=2), 12, 3), (Window(), 16, 4)],
)
def test_a_calibrated_list_sums_to_its_budget_and_gives_each_layer_what_it_needs(
    model, policy: Policy, budget: int, least: int
) -> None:
    network, text = model("smollm3"), tokens(90)
    given_out = calibrate(network, text, policy, budget, chunk=8)
    assert sum(given_out) == 4 * budget
    assert len(set(given_out)) > 1
    assert min(given_out) >= max(least, budget // 4)
    assert max(given_out) <= min(3 * budget, 90)
    assert given_out == calibrate(network, text, policy, budget, chunk=8)
    SinkCache(network, policy, given_out)


@pytest.mark.parametrize(("grid", "tried"), [(None, [4, 6, 8, 10, 12, 16, 20, 24]), ([9, 20, 30], [4, 9, 20, 24])])
def test_no_budget_is_tried_that_is_longer_than_the_text(
    model, monkeypatch: pytest.MonkeyPatch, grid: list[int] | None, tried: list[int]
) -> None:
    def greedy(network: Any, text: Tensor, policy: Policy, budgets: list[int], chunk: int) -> Tensor:
        assert budgets == tried
        return torch.stack([torch.arange(len(budgets)).flip(0), *torch.zeros(3, len(budgets))])

    monkeypatch.setattr("sinkcache.calibration.missed", greedy)
    assert calibrate(model("smollm3"), tokens(24), Window(), 16, least=4, grid=grid, even=0) == [24, 14, 13, 13]


def test_a_grid_and_a_least_are_kept_to(model) -> None:
    got = calibrate(model("smollm3"), tokens(60), Window(), 12, chunk=4, least=6, grid=[2, 9, 18, 200])
    assert sum(got) == 48
    assert min(got) >= 6
    assert max(got) <= 60


def test_a_calibrated_list_is_evened_out_by_a_quarter(model) -> None:
    network, text = model("smollm3"), tokens(90)
    found, given, alike = (
        calibrate(network, text, Window(), 16, chunk=8, even=0),
        calibrate(network, text, Window(), 16, chunk=8),
        calibrate(network, text, Window(), 16, chunk=8, even=1),
    )
    assert len(set(found)) > 1
    assert given == evened(found, 0.25)
    assert alike == [16] * 4


def test_evened_budgets_lie_between_those_given_and_their_mean() -> None:
    assert evened([4, 12], 0) == [4, 12]
    assert evened([4, 12], 0.25) == [5, 11]
    assert evened([4, 12], 1) == [8, 8]
    assert evened([1, 2, 6], 0.5) == [2, 3, 4]  # 2, 2.5 and 4.5: of equal fractions the first is rounded up


@pytest.mark.parametrize("near", [0, 1])
def test_a_layer_that_attends_to_the_newest_gives_its_tokens_to_one_that_looks_far(near: int) -> None:
    network: Any = build("llama", attention_bias=True)
    attention = network.model.layers[near].self_attn
    for projection in (attention.q_proj, attention.k_proj):  # all queries alike, all keys too, but for their rotation
        torch.nn.init.zeros_(projection.weight)
        torch.nn.init.constant_(projection.bias, 4.0)
    far = network.model.layers[1 - near].self_attn
    far.q_proj.weight.data.mul_(2)
    got = calibrate(network, tokens(96), H2O(recent=4), 16, chunk=8, even=0)
    assert got[near] <= 8 < 24 <= got[1 - near]


def test_calibrating_leaves_the_model_as_it_was(model) -> None:
    network, text = model("llama"), tokens(40)
    network.set_attn_implementation("sdpa")
    before = network(input_ids=text).logits
    calibrate(network, text, Window(), 8, chunk=8)
    assert network.config._attn_implementation == "sdpa"
    assert torch.equal(network(input_ids=text).logits, before)


def test_layers_that_keep_their_native_cache_get_none(model) -> None:
    network, text = model("gemma3"), tokens(60)
    assert calibrate(network, text, StreamingLLM(), 12, chunk=8) == [12]
    assert missed(network, text, StreamingLLM(), [8, 12], 8).shape == (1, 2)


def test_tokens_go_where_a_token_saves_most() -> None:
    missing = torch.tensor([[8.0, 7.5, 0.0], [8.0, 5.0, 4.0], [1.0, 1.0, 1.0]])
    assert shared_out(missing, [2, 4, 8], budget=2) == [2, 2, 2]
    # 1.5 a token for the second layer's step to 4, 1.33 for the first's to 8, 0.25 for both others
    assert shared_out(missing, [2, 4, 8], budget=3) == [3, 4, 2]  # one token is no step: it goes to one that has least
    assert shared_out(missing, [2, 4, 8], budget=4) == [4, 4, 4]  # there is no room for the step to 8
    assert shared_out(missing, [2, 4, 8], budget=5) == [8, 4, 3]
    assert shared_out(missing, [2, 4, 8], budget=8) == [8, 8, 8]
    assert shared_out(torch.tensor([[8.0, 8.0, 0.0], [8.0, 7.0, 6.5]]), [2, 4, 8], budget=5) == [8, 2]  # in one step


@given(st.data())
def test_what_is_shared_out_is_the_budget(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 6))
    tried = sorted(data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=5)))
    budget = data.draw(st.integers(tried[0], tried[-1]))
    rows = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(tried), max_size=len(tried))
    missing = torch.tensor([sorted(data.draw(rows), reverse=True) for _ in range(layers)])
    got = shared_out(missing, tried, budget)
    assert sum(got) == layers * budget
    assert tried[0] <= min(got) <= max(got) <= tried[-1]


def test_what_a_policy_needs_is_found() -> None:
    assert [least_budget(policy, 64) for policy in (Window(), StreamingLLM(6), H2O(20, num_sinks=3))] == [1, 7, 24]
    assert least_budget(Protect(Window(), 4, 59), 64) == 64


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"policy": H2O(recent=64)}, ValueError, "with budget=12: raise the budget"),
        ({"policy": "H2O"}, TypeError, "policy must be a Policy object"),
        ({"budget": 0}, ValueError, "budget must be a whole number of tokens, 1 or more, got 0"),
        ({"budget": 0.5}, ValueError, "budget must be a whole number of tokens, 1 or more, got 0.5"),
        ({"budget": 40}, ValueError, "a budget of 40 evicts nothing from a text of 40 tokens"),
        ({"least": 13}, ValueError, "least=13 with budget=12"),
        ({"least": 0}, ValueError, "least=0 with budget=12"),
        ({"least": 3, "policy": StreamingLLM(4)}, ValueError, "num_sinks"),
        ({"grid": [4, 8]}, ValueError, "grid must reach the budget, got at most 8"),
        ({"grid": [4, 12.5]}, ValueError, "grid must hold whole numbers of tokens"),
        ({"input_ids": torch.ones(2, 40, dtype=torch.int64)}, ValueError, "one text"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1"),
        ({"even": 1.5}, ValueError, "even must be between 0 .as found. and 1 .all alike., got 1.5"),
        ({"even": -0.1}, ValueError, "got -0.1"),
    ],
)
def test_what_cannot_be_calibrated_is_an_error_before_anything_is_read(
    model, unchecked, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], error: type[Exception], said: str
) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("a text was read")

    monkeypatch.setattr("sinkcache.calibration.overhear", never)
    arguments: dict[str, Any] = {"input_ids": tokens(40), "policy": Window(), "budget": 12, **more}
    with pytest.raises(error, match=said):
        calibrate(model("llama"), **arguments)


def test_models_that_cannot_be_calibrated_are_refused(model, unchecked) -> None:
    with pytest.raises(TypeError, match="needs the model: got its LlamaConfig"):
        calibrate(model("llama").config, tokens(40), Window(), 12)
    with pytest.raises(ValueError, match="no layer of full attention"):
        calibrate(model("mistral", sliding_window=8), tokens(40), Window(), 12)
    latent = tf.DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        initializer_range=0.3,
    )
    network = tf.DeepseekV3ForCausalLM(latent).eval()
    with pytest.raises(ValueError, match="has latent attention"):
        calibrate(network, tokens(40), Window(), 12)


# the same shares at another budget

LISTS = st.lists(st.integers(1, 2000), min_size=1, max_size=40)


@given(LISTS, st.integers(1, 4096), st.data())
def test_scaled_budgets_sum_to_the_token_and_keep_their_order(budgets: list[int], budget: int, data: Any) -> None:
    least = data.draw(st.integers(1, budget))
    got = scaled(budgets, budget, least)
    assert sum(got) == len(budgets) * budget
    assert min(got) >= least
    pairs = sorted(zip(budgets, got, strict=True))
    assert all(mine <= next_one + 1 for (_, mine), (_, next_one) in itertools.pairwise(pairs))
    exact = [each * len(budgets) * budget / sum(budgets) for each in budgets]
    if min(exact) >= least:
        assert all(abs(mine - one) < 1 for mine, one in zip(got, exact, strict=True))


@given(LISTS, st.integers(1, 4096))
def test_scaled_budgets_round_the_largest_fractions_up(budgets: list[int], budget: int) -> None:
    total = len(budgets) * budget
    exact = [Fraction(each * total, sum(budgets)) for each in budgets]
    whole = [math.floor(each) for each in exact]
    assume(min(whole) >= 1)
    up = sorted(range(len(budgets)), key=lambda layer: (whole[layer] - exact[layer], layer))[: total - sum(whole)]
    assert scaled(budgets, budget) == [each + (layer in up) for layer, each in enumerate(whole)]


@given(LISTS)
def test_at_its_own_budget_a_list_stays_as_it_is(budgets: list[int]) -> None:
    mean, over = divmod(sum(budgets), len(budgets))
    budgets = [each + (index < len(budgets) - over) * (over > 0) for index, each in enumerate(budgets)]
    assert scaled(budgets, mean + (over > 0)) == budgets


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], 8), "an entry for each bounded layer"),
        (([4, 0], 8), "a layer's budget must be"),
        (([4, 0.5], 8), "got 0.5"),
        (([4, 8], 0), "budget must be"),
        (([4, 8], 8, 9), "least=9 with budget=8"),
        (([4, 8], 8, 0), "least must be"),
    ],
)
def test_scaling_nonsense_is_an_error(unchecked, arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scaled(*arguments)
