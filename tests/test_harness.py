"""The harness's tasks give through a bounded cache what one read by hand gives, and through a large one hf's own."""

import inspect
import json
import logging
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

pytest.importorskip("lm_eval", reason='needs pip install "sinkcache[lm-eval]"')

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from sinkcache import SinkCache, __version__, harness, harness_options
from sinkcache.guard import cache_argument
from sinkcache.harness import SinkCacheLM
from sinkcache.metrics import score
from sinkcache.policies import H2O, Phases, Protect, SnapKV, StreamingLLM, Window
from sinkcache.policy import Policy
from sinkcache.streaming import prefill

TRAINED = 64
TEMPLATE = "{% for each in messages %}w1 {{ each.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
SMALL: list[tuple[Policy, str | None]] = [
    (StreamingLLM(2), None),
    (StreamingLLM(2), "original"),
    (H2O(recent=4), None),
    (H2O(recent=4), "cache"),
    (Phases(SnapKV(observation_window=4), Window()), None),
]


def words(start: int, count: int) -> str:
    return " ".join(f"w{(start + index * index * 7 + index) % 90}" for index in range(count))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in float64, trained for 64 tokens as its config has it, and its tokenizer."""
    place = tmp_path_factory.mktemp("model")
    network: Any = build("llama", max_position_embeddings=TRAINED)
    network.save_pretrained(place)
    vocabulary = {"<unk>": 0, "<e>": 1, **{f"w{index}": index + 2 for index in range(95)}}
    plain = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<e>", pad_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three local tasks: `tiny_choice`, `tiny_stream` and `tiny_answer`, of four documents each."""
    place = tmp_path_factory.mktemp("tasks")
    choice = [
        {
            "context": words(at, 20 + 7 * at),
            "choices": [words(at + 1, 3), words(at + 5, 1), words(at + 9, 4)],
            "answer": at % 3,
        }
        for at in range(4)
    ]
    _task(place, "tiny_choice", choice, output_type="multiple_choice", doc_to_text="{{context}}",
          doc_to_target="{{answer}}", doc_to_choice="{{choices}}", metric_list=[{"metric": "acc"}])  # fmt: skip
    stream = [{"text": words(at, 25 + 11 * at)} for at in range(4)]
    _task(place, "tiny_stream", stream, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
          metric_list=[{"metric": "word_perplexity"}])  # fmt: skip
    answer = [{"question": words(at + 3, 18 + 6 * at), "answer": words(at, 2)} for at in range(4)]
    _task(place, "tiny_answer", answer, output_type="generate_until", doc_to_text="{{question}}",
          doc_to_target="{{answer}}", generation_kwargs={"until": ["w7"], "max_gen_toks": 12},
          metric_list=[{"metric": "exact_match"}])  # fmt: skip
    return place


def _task(place: Path, name: str, documents: list[dict], **config: Any) -> None:
    data = place / f"{name}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents))
    read = {"data_files": {"test": str(data)}, "cache_dir": str(place / "cache")}
    whole = {"task": name, "dataset_path": "json", "dataset_kwargs": read, "test_split": "test", **config}
    (place / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML


@pytest.fixture
def lm(folder: str) -> Callable[..., SinkCacheLM]:
    """`lm(**arguments)`: the model through a cache, in float64."""
    return lambda **given: SinkCacheLM(folder, **{"dtype": "float64", "device": "cpu", "chunk": 8, **given})


def evaluated(model: str, folder: str, tasks: Path, names: list[str], chat: bool = False, **given: Any) -> Any:
    evaluate: Any = lm_eval.simple_evaluate
    return evaluate(
        model=model,
        model_args={"pretrained": folder, "dtype": "float64", "device": "cpu", **given},
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
    )


def hf(folder: str) -> Any:
    """The harness's own model, on the same weights."""
    kind: Any = get_model("hf")
    return kind(folder, dtype="float64", device="cpu")


def responses(results: Any, name: str) -> list[Any]:
    """What the model said to each request, in the order of the documents."""
    ordered = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [one for sample in ordered for response in sample["resps"] for one in response]


def requests(kind: Any, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def by_hand(lm: SinkCacheLM, context: str, continuation: str, policy: Policy, budget: Any, positions: Any) -> float:
    """The log-likelihood of a continuation, by calls of the model alone."""
    ids = torch.tensor([lm.tok_encode(f"{context} {continuation}")])
    start = len(lm.tok_encode(context))
    cache = SinkCache(lm.model, policy, budget, positions)
    with torch.no_grad():
        for at in range(0, start - 1, lm.chunk):
            cache.unfinished = at + lm.chunk < start - 1
            lm.model(input_ids=ids[:, at : min(at + lm.chunk, start - 1)], **{cache_argument(lm.model): cache})
        cache.unfinished = False
        logits = lm.model(input_ids=ids[:, start - 1 : -1], **{cache_argument(lm.model): cache}).logits[0]
    return float(logits.log_softmax(-1)[range(len(logits)), ids[0, start:]].sum())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[SinkCache]:
    """The caches that requests are read through, as they are left."""
    caches: list[SinkCache] = []
    whole = SinkCacheLM._cache

    def spied(self: SinkCacheLM, prompt: int | None = None) -> Any:
        cache: Any = whole(self, prompt)
        if prompt is not None:  # the first, of __init__, has no request
            caches.append(cache)
        return cache

    monkeypatch.setattr(SinkCacheLM, "_cache", spied)
    return caches


def test_is_known_to_the_harness_by_its_name():
    assert get_model("sinkcache") is SinkCacheLM


@pytest.mark.parametrize("policy", ["none", "StreamingLLM(num_sinks=4)", "H2O(recent=4)"])
def test_cache_that_holds_all_gives_the_scores_of_hf(folder, tasks, policy):
    names = ["tiny_choice", "tiny_stream", "tiny_answer"]
    budget: dict[str, Any] = {} if policy == "none" else {"budget": 512}
    theirs = evaluated("hf", folder, tasks, names)
    ours = evaluated("sinkcache", folder, tasks, names, policy=policy, chunk=8, **budget)
    assert ours["results"].keys() == theirs["results"].keys()
    for name in names:
        [metric] = [each for each in theirs["results"][name] if each.endswith(",none") and "stderr" not in each]
        assert ours["results"][name][metric] == pytest.approx(theirs["results"][name][metric], rel=1e-9), name
    assert responses(ours, "tiny_answer") == responses(theirs, "tiny_answer")
    likelihoods = [[each[0] for each in responses(one, "tiny_choice")] for one in (ours, theirs)]
    assert len(likelihoods[0]) == 12
    assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-6)
    assert [each[1] for each in responses(ours, "tiny_choice")] == [
        each[1] for each in responses(theirs, "tiny_choice")
    ]
    rolling = [responses(one, "tiny_stream") for one in (ours, theirs)]
    assert rolling[0] == pytest.approx(rolling[1], abs=1e-6)


@pytest.mark.parametrize(("policy", "positions"), SMALL, ids=str)
def test_small_budget_scores_what_a_cache_by_hand_does(lm, policy, positions):
    mine = lm(policy=policy, budget=12, positions=positions)
    asked = [(words(1, 40), " " + words(3, 4)), (words(2, 33), " " + words(8, 1)), (words(5, 17), " " + words(4, 6))]
    found = [value for value, _ in mine.loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)]
    full = [value for value, _ in lm(policy="none").loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)]
    expected = [by_hand(mine, context, after.strip(), policy, 12, positions) for context, after in asked]
    assert found == pytest.approx(expected, abs=1e-9)
    assert all(abs(one - other) > 0.01 for one, other in zip(found, full, strict=True))


@pytest.mark.parametrize(("policy", "positions"), SMALL, ids=str)
def test_stream_is_scored_as_metrics_score_it(lm, policy, positions):
    mine = lm(policy=policy, budget=12, positions=positions)
    text = words(6, 60)
    [found] = mine.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    ids = torch.tensor([mine.tok_encode(text)])
    parts = list(score(mine.model, SinkCache(mine.model, policy, 12, positions), ids, 8, bos=mine.prefix_token_id))
    assert sum(len(each.nll) for each in parts) == 60
    assert found == pytest.approx(-sum(float(each.nll.sum()) for each in parts), rel=1e-6)  # metrics has float32


@pytest.mark.parametrize(("policy", "positions"), SMALL, ids=str)
def test_small_budget_generates_what_a_cache_by_hand_does(lm, policy, positions):
    mine = lm(policy=policy, budget=12, positions=positions)
    prompts = [words(4, 40), words(7, 21)]
    asked = [(prompt, {"until": ["w7 "], "max_gen_toks": 15}) for prompt in prompts]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([mine.tok_encode(prompt)])
        cache = SinkCache(mine.model, policy, 12, positions)
        prefill(mine.model, cache, ids[:, :-1], 8)
        out = mine.model.generate(
            ids,
            max_new_tokens=15,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
            **{cache_argument(mine.model): cache},
        )
        expected.append(mine.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("w7 ")[0])
    assert mine.generate_until(requests("generate_until", *asked), disable_tqdm=True) == expected
    full = lm(policy="none").generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert full != expected


def test_generation_ends_at_a_stop_string(lm, made):
    mine = lm(budget=12)
    free, stop = words(4, 40), {"until": [], "max_gen_toks": 20}
    [text] = mine.generate_until(requests("generate_until", (free, stop)), disable_tqdm=True)
    third = text.split()[2]
    assert third not in text.split()[:2]
    until = {"until": [third], "max_gen_toks": 20}
    [cut] = mine.generate_until(requests("generate_until", (free, until)), disable_tqdm=True)
    assert cut == text.split(third)[0]
    assert made[-1].seen == made[-2].seen - 17  # not generated and thrown away


def test_cache_holds_no_more_than_its_budget(lm, made):
    mine = lm(policy=H2O(recent=4), budget=12)
    mine.loglikelihood(requests("loglikelihood", (words(1, 40), " " + words(3, 4))), disable_tqdm=True)
    mine.loglikelihood_rolling(requests("loglikelihood_rolling", (words(1, 50),)), disable_tqdm=True)
    mine.generate_until(
        requests("generate_until", (words(1, 40), {"until": [], "max_gen_toks": 10})), disable_tqdm=True
    )
    assert [cache.seen for cache in made] == [43, 50, 49]  # all but the last token of each, which is only scored
    assert [[cache.kept(layer).shape[-1] for layer in range(2)] for cache in made] == [[12, 12]] * 3


def test_a_request_does_not_change_the_next_and_answers_keep_their_order(lm):
    mine = lm(policy=H2O(recent=4), budget=12)
    contexts = [words(1, 40), words(2, 9), words(1, 40), words(5, 23), "", words(2, 9)]
    pairs = [(context, " " + words(at, 1 + at % 3)) for at, context in enumerate(contexts)]
    alone = [lm(policy=H2O(recent=4), budget=12).loglikelihood(requests("loglikelihood", pair))[0] for pair in pairs]
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 3, 1]):
        together = mine.loglikelihood(requests("loglikelihood", *(pairs[at] for at in order)), disable_tqdm=True)
        assert [each[0] for each in together] == pytest.approx([alone[at][0] for at in order], abs=1e-9)
        assert [each[1] for each in together] == [alone[at][1] for at in order]
    texts = [(words(3, 20),), (words(4, 50),)]
    one_by_one = [mine.loglikelihood_rolling(requests("loglikelihood_rolling", each), True)[0] for each in texts]
    assert mine.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), True) == one_by_one
    prompts = [(words(at, 12 + 9 * at), {"until": [], "max_gen_toks": 6}) for at in (1, 3, 2)]
    answers = [mine.generate_until(requests("generate_until", each), True)[0] for each in prompts]
    assert mine.generate_until(requests("generate_until", *prompts), True) == answers
    assert len(set(answers)) == 3


def test_says_what_greedy_decoding_would_say(lm):
    mine = lm(policy=H2O(recent=4), budget=64)
    [said] = mine.generate_until(requests("generate_until", (words(1, 40), {"until": [], "max_gen_toks": 3})), True)
    other = f"{said.rsplit(' ', 1)[0]} w{(int(said.rsplit('w', 1)[1]) + 1) % 90}"
    asked = [(words(1, 40), f" {said}"), (words(1, 40), f" {other}")]
    assert [greedy for _, greedy in mine.loglikelihood(requests("loglikelihood", *asked), True)] == [True, False]


def test_context_is_read_once_for_all_its_continuations(lm, made):
    asked = [(words(1, 40), f" {words(at, 2)}") for at in range(4)]
    lm(budget=12).loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)
    assert len(made) == 1


@pytest.mark.parametrize("policy", ["none", "StreamingLLM(num_sinks=2)"])
def test_empty_context_is_the_prefix_token(lm, policy):
    mine = lm(policy=policy)
    [(found, _)] = mine.loglikelihood(requests("loglikelihood", ("", words(1, 5))), disable_tqdm=True)
    ids = torch.tensor([[mine.prefix_token_id, *mine.tok_encode(words(1, 5))]])
    with torch.no_grad():
        logs = mine.model(ids).logits[0].log_softmax(-1)
    assert found == pytest.approx(float(logs[range(5), ids[0, 1:]].sum()), abs=1e-9)


def test_empty_prompt_is_refused(lm):
    with pytest.raises(ValueError, match="at least one token to generate from, got \\[''\\]"):
        lm().generate_until(requests("generate_until", ("", {"until": []})), disable_tqdm=True)


@pytest.mark.parametrize("given", [{"policy": "none"}, {"budget": 12}])
def test_no_pass_reads_more_than_a_chunk(lm, given):
    mine = lm(**given, chunk=5)
    seen: list[int] = []
    mine.model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    mine.loglikelihood(requests("loglikelihood", (words(1, 14), " " + words(2, 11))), disable_tqdm=True)
    assert seen == [5, 5, 3, 5, 5, 1]


def test_nothing_is_cut_where_positions_count_within_the_cache(lm, made, caplog):
    mine = lm(budget=12)
    mine.loglikelihood(requests("loglikelihood", (words(1, 200), " " + words(3, 4))), disable_tqdm=True)
    mine.loglikelihood_rolling(requests("loglikelihood_rolling", (words(1, 300),)), disable_tqdm=True)
    mine.generate_until(
        requests("generate_until", (words(1, 150), {"until": [], "max_gen_toks": 10})), disable_tqdm=True
    )
    assert [cache.seen for cache in made] == [203, 300, 159]
    assert mine.get_model_info()["sinkcache"]["cut_tokens"] == 0
    assert "cut" not in caplog.text


@pytest.mark.parametrize("given", [{"policy": "none"}, {"policy": "Window", "budget": 512, "positions": "original"}])
def test_what_exceeds_the_trained_length_is_cut_as_hf_cuts_it_and_said(folder, lm, given, caplog):
    theirs = hf(folder)
    mine = lm(**given)
    pairs = requests("loglikelihood", (words(1, 100), " " + words(3, 4)), (words(1, 20), " " + words(3, 4)))
    texts = requests("loglikelihood_rolling", (words(1, 150),))
    prompts = requests("generate_until", (words(1, 90), {"until": [], "max_gen_toks": 10}))
    with caplog.at_level(logging.WARNING, logger="sinkcache.harness"):
        found = [value for value, _ in mine.loglikelihood(pairs, disable_tqdm=True)]
        said = mine.generate_until(prompts, disable_tqdm=True)
    assert found == pytest.approx([value for value, _ in theirs.loglikelihood(pairs, disable_tqdm=True)], abs=1e-6)
    assert said == theirs.generate_until(prompts, disable_tqdm=True)
    rolling = [one.loglikelihood_rolling(texts, disable_tqdm=True) for one in (mine, theirs)]
    assert rolling[0] == pytest.approx(rolling[1], abs=1e-6)
    how = mine.get_model_info()["sinkcache"]
    assert (how["cut_requests"], how["cut_tokens"]) == (2, (100 + 3 - TRAINED) + (90 + 10 - TRAINED))
    assert "cut 39 tokens on the left of a request: at most 64 are read" in caplog.text
    assert "cut 36 tokens" in caplog.text


def test_max_length_cuts_where_it_is_asked_for(lm, made):
    mine = lm(budget=12, max_length=30)
    mine.loglikelihood(requests("loglikelihood", (words(1, 100), " " + words(3, 4))), disable_tqdm=True)
    assert made[0].seen == 30
    assert mine.cut_tokens == 73


def test_continuation_that_cannot_fit_is_refused(lm):
    with pytest.raises(ValueError, match="at most max_length, and follows 1 or more: got 70 after 3"):
        lm(policy="none").loglikelihood(requests("loglikelihood", (words(1, 3), " " + words(2, 70))), disable_tqdm=True)


@pytest.mark.parametrize("budget", [0.25, [0.25, 0.25]])
def test_share_is_one_of_what_is_read(lm, made, budget):
    mine = lm(policy=Window(), budget=budget)
    mine.loglikelihood(requests("loglikelihood", (words(1, 41), " " + words(3, 4))), disable_tqdm=True)
    mine.loglikelihood_rolling(requests("loglikelihood_rolling", (words(1, 48),)), disable_tqdm=True)
    mine.generate_until(requests("generate_until", (words(1, 45), {"until": [], "max_gen_toks": 9})), disable_tqdm=True)
    assert [cache.kept(0).shape[-1] for cache in made] == [11, 13, 12]  # of 41, of 48 and the prefix token, of 45


def test_budget_may_differ_by_layer(lm, made):
    mine = lm(policy=Window(), budget=[6, 14])
    mine.loglikelihood(requests("loglikelihood", (words(1, 40), " " + words(3, 4))), disable_tqdm=True)
    assert [made[0].kept(layer).shape[-1] for layer in range(2)] == [6, 14]


@pytest.mark.parametrize("policy", ["none", "StreamingLLM(num_sinks=2)"])
def test_beam_search_goes_on_from_the_cache(folder, lm, policy):
    asked = [("generate_until", (words(at, 30), {"until": [], "max_gen_toks": 8, "num_beams": 3})) for at in (1, 2)]
    asked = requests("generate_until", *(each[1] for each in asked))
    theirs = hf(folder).generate_until(asked, disable_tqdm=True)
    assert lm(policy=policy).generate_until(asked, disable_tqdm=True) == theirs


def test_chat_template_is_applied_as_hf_applies_it(folder, tasks):
    plain = evaluated("sinkcache", folder, tasks, ["tiny_answer"], budget=512)
    ours, theirs = (evaluated(name, folder, tasks, ["tiny_answer"], chat=True) for name in ("sinkcache", "hf"))
    assert ours["samples"]["tiny_answer"][0]["arguments"] == theirs["samples"]["tiny_answer"][0]["arguments"]
    assert ours["samples"]["tiny_answer"][0]["arguments"] != plain["samples"]["tiny_answer"][0]["arguments"]
    assert responses(ours, "tiny_answer") == responses(theirs, "tiny_answer") != responses(plain, "tiny_answer")


def test_model_may_be_given_as_an_object(folder, lm):
    network = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    given = SinkCacheLM(network, tokenizer=tf.AutoTokenizer.from_pretrained(folder), budget=12, chunk=8)
    asked = requests("loglikelihood", (words(1, 40), " " + words(3, 4)))
    assert given.loglikelihood(asked, disable_tqdm=True) == lm(budget=12).loglikelihood(asked, disable_tqdm=True)


def test_embedded_model_is_loaded_by_its_name(folder, lm, monkeypatch):
    asked: list[tuple] = []

    def load(*given: Any) -> tuple[Any, Any]:
        asked.append(given)
        return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=given[1]), tf.AutoTokenizer.from_pretrained(folder)

    monkeypatch.setattr(harness_options, "load", load)
    mine = SinkCacheLM("smollm2-135m", dtype="float64", device="cpu", budget=12, chunk=8)
    assert asked == [("smollm2-135m", torch.float64, None, "cpu")]
    pair = requests("loglikelihood", (words(1, 40), " " + words(3, 4)))
    assert mine.loglikelihood(pair, disable_tqdm=True) == lm(budget=12).loglikelihood(pair, disable_tqdm=True)
    with pytest.raises(ValueError, match="subfolder is for a hub id or a folder, and 'smollm2-135m' is none"):
        SinkCacheLM("smollm2-135m", subfolder="part")


def test_probabilities_are_in_float32_at_least(lm):
    mine = lm(policy="none", dtype="bfloat16")
    [(found, _)] = mine.loglikelihood(requests("loglikelihood", (words(1, 8), " " + words(3, 12))), disable_tqdm=True)
    ids = torch.tensor([mine.tok_encode(f"{words(1, 8)} {words(3, 12)}")])
    cache = tf.DynamicCache(config=mine.model.config)
    with torch.no_grad():
        mine.model(input_ids=ids[:, :7], **{cache_argument(mine.model): cache})
        logits = [
            mine.model(input_ids=ids[:, at : at + 8], **{cache_argument(mine.model): cache}).logits for at in (7, 15)
        ]
    logits = torch.cat(logits, dim=1)[0, :12]
    exact, rounded = (float(one.log_softmax(-1)[range(12), ids[0, 8:]].sum()) for one in (logits.float(), logits))
    assert found == pytest.approx(exact, abs=1e-4)
    assert abs(rounded - exact) > 1e-2


def test_results_say_how_they_were_read(folder, tasks):
    given = {"policy": "H2O(recent=4, num_sinks=1)", "budget": [12, 16], "positions": "cache", "chunk": 8}
    config = evaluated("sinkcache", folder, tasks, ["tiny_stream"], **given)["config"]
    said = config["sinkcache"]
    assert said == {
        "version": __version__, "policy": repr(H2O(recent=4, num_sinks=1)), "budget": [12, 16], "positions": "cache",
        "chunk": 8, "cut_requests": 0, "cut_tokens": 0,
    }  # fmt: skip
    assert config["model"] == "sinkcache"
    assert evaluated("sinkcache", folder, tasks, ["tiny_stream"])["config"]["sinkcache"]["positions"] == "cache"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"policy": "H3O"}, "no policy is named H3O: did you mean H2O"),
        ({"policy": "none", "budget": 64}, 'budget and positions are a policy\'s, got them with policy="none"'),
        ({"policy": "none", "positions": "cache"}, 'got them with policy="none"'),
        ({"budget": 0}, "budget must be at least 1 token, got 0"),
        ({"budget": 1.5}, "share of the prompt must be in"),
        ({"budget": [8, 8, 8]}, "budget has 3 entries for 2 bounded layers"),
        ({"chunk": 0}, "chunk must be at least 1 token, got 0"),
        ({"batch_size": "auto"}, "batch_size must be 1, got auto: requests are read one by one"),
        ({"batch_size": 8}, "batch_size must be 1, got 8"),
        ({"dtype": "float23"}, "dtype must be .* got 'float23'"),
        ({"device": "gpu9"}, "device 'gpu9' cannot be used here"),
        ({"peft": "some/adapter"}, "peft is not for this model: in Python, a model that was changed"),
        ({"parallelize": True}, "parallelize is not for this model: it runs in one process on one device"),
        ({"backend": "seq2seq"}, "backend is not for this model: only causal models"),
        ({"load_in_4bit": True}, "'load_in_4bit' is no argument of this model: it takes pretrained, policy"),
        ({"num_sinks": 4}, "'num_sinks' is no argument of this model"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_its_reason(lm, given, reason):
    with pytest.raises(ValueError, match=reason):
        lm(**given)


def test_each_option_of_hf_is_taken_or_refused_by_name():
    theirs = set(inspect.signature(get_model("hf")).parameters) - {"kwargs"}
    known = {*harness_options.OWN, *harness_options.PASSED, *harness_options._REFUSED, "batch_size"}
    assert theirs - known == set()


def test_several_processes_are_refused(lm, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes are not for this model"):
        lm()


@pytest.mark.parametrize(
    "text",
    [
        "policy=Protect(H2O(recent=4,half_life=8),num_sinks=1,recent=4),budget=[12,16]",
        "budget=[12,16],policy=Protect(H2O(4,half_life=8),1,4)",
    ],
)
def test_policy_with_commas_is_one_argument(folder, text):
    mine = SinkCacheLM.create_from_arg_string(f"pretrained={folder},device=cpu,{text}", {"batch_size": None})
    assert mine.policy == Protect(H2O(recent=4, half_life=8), num_sinks=1, recent=4)
    assert mine.budget == [12, 16]


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    own = partial(TaskManager, include_defaults=False)  # the harness's own 15,000 tasks take it 7 s
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own)
    monkeypatch.setattr(sys, "argv", ["sinkcache.harness", *argv])
    return harness.main()


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "words"])
def test_command_runs_a_task_and_writes_its_results(folder, tasks, tmp_path, monkeypatch, capsys, as_json):
    given: dict[str, Any] = {"pretrained": folder, "policy": "H2O(recent=4, num_sinks=1)", "budget": 12, "chunk": 8}
    arguments = json.dumps(given) if as_json else ",".join(f"{name}={value}" for name, value in given.items())
    out = tmp_path / "results.json"
    asked = [
        "--model_args",
        arguments,
        "--tasks",
        "tiny_answer",
        "--include_path",
        str(tasks),
        "--output_path",
        str(out),
    ]
    assert run(monkeypatch, *asked) == 0
    assert "|tiny_answer|" in capsys.readouterr().out
    [written] = tmp_path.glob("results_*.json")
    config = json.loads(written.read_text())["config"]
    assert config["model"] == "sinkcache"
    assert (config["sinkcache"]["policy"], config["sinkcache"]["budget"]) == (repr(H2O(recent=4, num_sinks=1)), 12)


def test_command_tells_a_mistake_in_one_line(folder, tasks, monkeypatch, capsys):
    asked = ["--tasks", "tiny_answer", "--include_path", str(tasks), "--model_args"]
    assert run(monkeypatch, *asked, f"pretrained={folder},policy=H3O") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("sinkcache: no policy is named H3O")
    assert run(monkeypatch, *asked, "pretrained=/no/such/folder") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("sinkcache: ")


@pytest.fixture
def without_harness(monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of the module, where lm_eval cannot be imported."""
    for name in [each for each in sys.modules if each.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    return str(harness.__file__)


def test_without_the_harness_the_command_says_what_to_install(without_harness, capsys):
    with pytest.raises(SystemExit) as left:
        runpy.run_path(without_harness, run_name="__main__")
    assert left.value.code == 2
    expected = 'sinkcache: lm_eval is not installed: run `pip install "sinkcache[lm-eval]"`\n'
    assert capsys.readouterr().err == expected


def test_without_the_harness_the_module_says_what_to_install(without_harness):
    with pytest.raises(ModuleNotFoundError, match="lm_eval is not installed: run `pip install"):
        runpy.run_path(without_harness, run_name="sinkcache.harness")


def test_nothing_else_of_sinkcache_imports_the_harness():
    others = [each for each in Path(harness.__file__).parent.rglob("*.py") if each.name != "harness.py"]
    assert len(others) > 50
    for each in others:
        assert not re.search(r"import lm_eval|from lm_eval|sinkcache\.harness\b|import harness\b", each.read_text()), (
            each
        )


def test_tasks_of_the_readme_are_the_harnesss():
    place = Path(str(lm_eval.__file__)).parent / "tasks"
    known = set()
    for name in ("longbench", "longbench2", "ruler"):
        known |= set(TaskManager(include_path=str(place / name), include_defaults=False).all_tasks)
    assert {"longbench", "longbench_e", "longbench_qasper", "longbench2", "ruler", "niah_single_1", "ruler_vt"} <= known
