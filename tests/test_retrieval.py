import re
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import tokenizers
import torch
from conftest import build
from tokenizers import decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

from experiments.grid.cell import Cell
from experiments.retrieval import cell as cells
from experiments.retrieval.answering import Answer, answered, held, right
from experiments.retrieval.filler import Prose, of_language, of_text
from experiments.retrieval.prompts import EARLY, HIDING, LATE, MULTIKEY, PASSKEY, Language, Question, Reading, hidden
from experiments.retrieval.streameval import lines, stream, tokens_back
from experiments.retrieval.wording import ENGLISH, LANGUAGES
from sinkcache import SinkCache
from sinkcache.policies import H2O, AdaKV, SnapKV, StreamingLLM, Window
from sinkcache.policy import Entries, Policy
from sinkcache.texts import Text

FIRST = "<s>"


def bytewise(bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes; with `bos`, it puts one in front."""
    letters = {each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = tokenizers.Tokenizer(models.BPE(vocab={**letters, FIRST: 256}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    plain.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    if bos:
        single = tokenizers.processors.TemplateProcessing(single=f"{FIRST} $A", special_tokens=[(FIRST, 256)])
        plain.post_processor = single  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=FIRST)


TOKENIZER = bytewise()


def language(name: str = "en", tokenizer: Any = TOKENIZER) -> Language:
    return Language(tokenizer, LANGUAGES[name], of_language(LANGUAGES[name]))


def text_of(reading: Reading, ids: Any = None) -> str:
    return str(TOKENIZER.decode(list(reading.ids if ids is None else ids)))


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", torch.float64, vocab_size=257, max_position_embeddings=4096)


@dataclass(frozen=True)
class Spy(Policy):
    """A window that notes the newest token at each of its decisions."""

    newest: list[int] = field(default_factory=list, compare=False)

    def score(self, entries: Entries) -> torch.Tensor:
        self.newest.append(int(entries.positions.max()))
        return entries.positions.float()


@pytest.mark.parametrize("task", HIDING)
@pytest.mark.parametrize("name", ["en", "ko"])
@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.93, 1.0])
def test_a_prompt_is_as_long_as_asked_and_has_its_number_where_asked(task: str, name: str, depth: float) -> None:
    for seed in range(3):
        reading = hidden(language(name), task, 1500, depth, keys=3, seed=seed)
        (question,) = reading.questions
        assert len(reading.ids) == 1500
        assert question.end == len(reading.ids)
        assert text_of(reading, [reading.ids[at] for at in question.number]) == question.expected
        text = text_of(reading)
        assert text.count(question.expected) == 1
        assert len(re.findall(r"\d+", text)) == (1 if task == PASSKEY else 3)
        if task == PASSKEY:
            asking = len(language(name).encode(LANGUAGES[name].question))
            opening = len(language(name).encode(LANGUAGES[name].opening))
            needle = len(language(name).encode(LANGUAGES[name].needle.format(number="12345")))
            prose = len(reading.ids) - opening - needle - asking
            at = question.number[0] - opening
            assert abs(at - depth * prose) <= (200 if name == "ko" else 100)  # a sentence


def test_a_prompt_of_english_has_its_number_at_the_very_depth() -> None:
    wording, spoken = ENGLISH, language()
    opening, before = (len(spoken.encode(each)) for each in (wording.opening, " The pass key is "))
    fixed = len(spoken.encode(wording.needle.format(number=12345) + wording.question)) + opening
    for depth in (0.25, 0.5, 0.75):
        reading = hidden(spoken, PASSKEY, 1500, depth, 3, 0)
        assert reading.questions[0].number[0] == opening + round(depth * (1500 - fixed)) + before


def test_the_question_ends_the_prompt_and_asks_for_the_number_that_is_expected() -> None:
    for seed in range(5):
        reading = hidden(language(), MULTIKEY, 1200, 0.5, 4, seed)
        text = text_of(reading)
        name = re.search(r"number of the (\w+)\? The number of the \1 is$", text)
        assert name is not None
        assert f"The number of the {name[1]} is {reading.questions[0].expected}. Remember it." in text


def test_prose_is_whole_sentences_none_of_them_twice() -> None:
    reading = hidden(language(), PASSKEY, 4000, 0.5, 3, 1)
    prose = text_of(reading).removeprefix(ENGLISH.opening).partition("\n\n")[0]
    sentences = [each for each in prose.strip().removesuffix(".").split(". ") if "pass key" not in each]
    assert len(sentences) > 35
    assert len(set(sentences)) == len(sentences)
    for each in (one.removeprefix("Remember it. ") for one in sentences if one != "Remember it"):
        assert any(each.startswith(who) for who in ENGLISH.parts[0]), each
        assert any(each.endswith(when) for when in ENGLISH.parts[-1]), each


def test_prompts_are_the_seeds_alone() -> None:
    one = [hidden(language(), MULTIKEY, 900, 0.5, 3, seed) for seed in (0, 1)]
    again = [hidden(language(), MULTIKEY, 900, 0.5, 3, seed) for seed in (0, 1)]
    assert one == again
    assert one[0] != one[1]
    assert stream(language(), 3, 2, 4, 7, 0) == stream(language(), 3, 2, 4, 7, 0)
    assert stream(language(), 3, 2, 4, 7, 0) != stream(language(), 3, 2, 4, 8, 0)


def test_tasks_with_names_differ_in_nothing_but_when_the_question_is_known() -> None:
    multi, late, early = (hidden(language(), task, 1200, 0.5, 3, 0) for task in (MULTIKEY, LATE, EARLY))
    assert multi.ids == late.ids
    assert multi.questions == late.questions
    assert (multi.pause, early.pause) == (0, 0)
    asking = text_of(late, late.ids[late.pause :])
    assert asking.startswith("\n\nWhat is the number of the ")
    assert text_of(multi).count(asking.strip()) == 1
    assert text_of(early).startswith(asking.strip() + "\n\n")
    assert text_of(early).endswith(asking)
    assert early.questions[0].expected == multi.questions[0].expected


def test_a_prompt_too_short_for_its_words_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--length 60 is too short for passkey: it takes \d+ tokens at least"):
        hidden(language(), PASSKEY, 60, 0.5, 3, 0)


def test_what_the_tokenizer_puts_in_front_comes_first_and_once() -> None:
    with_bos = language(tokenizer=bytewise(bos=True))
    for reading in (hidden(with_bos, PASSKEY, 900, 0.5, 3, 0), stream(with_bos, 3, 3, 2, 0, 0)):
        assert reading.ids[0] == 256
        assert reading.ids.count(256) == 1
        question = reading.questions[0]
        assert text_of(reading, [reading.ids[at] for at in question.number]) == question.expected


@pytest.mark.parametrize("tokens", [80, 99, 131, 250, 1000, 1001])
def test_prose_makes_up_the_number_of_tokens(tokens: int) -> None:
    taken = Prose(language().sentences(Random(0)), language().encode).take(tokens)
    assert len(taken) == tokens
    assert str(TOKENIZER.decode(taken)).endswith(".")


def test_prose_of_a_text_has_its_sentences_and_no_digits() -> None:
    words = "The {} dog ran over the field. It was {} o'clock when he came home again. "
    text = Text("a", "".join(words.format("abcdefghij"[n % 10] * (n + 3), n) for n in range(60)), "")
    taken = Prose(of_text(text)(Random(3)), language().encode).take(700)
    said = str(TOKENIZER.decode(taken))
    assert len(taken) <= 700
    assert not re.search(r"\d", said)
    assert all(re.fullmatch(r" The (\w)\1+ dog ran over the field", each) for each in said[:-1].split("."))


def test_a_text_that_ends_too_early_is_refused() -> None:
    text = Text("a", "The dog ran over the field. The cat sat upon a mat.", "")
    with pytest.raises(ValueError, match="tokens too early: give a longer one"):
        Prose(of_text(text)(Random(0)), language().encode).take(500)
    with pytest.raises(ValueError, match="no sentences without digits"):
        of_text(Text("a", "It was 9 when he came home. In 1984 it was not.", ""))


@pytest.mark.parametrize("name", ["en", "ko"])
def test_words_hold_one_number_each_and_prose_none(name: str) -> None:
    wording = LANGUAGES[name]
    for sentence in (wording.needle, wording.named_needle, wording.line):
        assert sentence.count(" {number}") == 1
    assert not re.search(r"\d", "".join(word for part in wording.parts for word in part))
    for words in (*wording.parts, wording.nouns, wording.adjectives):
        assert len(set(words)) == len(words)
    for count in (5, 100, 700):
        assert len(set(wording.names(count, Random(0)))) == count
    with pytest.raises(ValueError, match="names and 1,000,000 are needed"):
        wording.names(1_000_000, Random(0))


@pytest.mark.parametrize(
    ("said", "is_right"),
    [(" 12345. The", True), ("12345", True), (" 123456", False), (" 54321, 12345", False), (" none", False)],
)
def test_the_first_number_said_is_the_answer(said: str, is_right: bool) -> None:
    assert right(said, "12345") is is_right


@pytest.mark.parametrize(("distance", "every", "first"), [(1, 1, 1), (3, 2, 4), (4, 2, 4), (5, 10, 10), (20, 10, 20)])
def test_a_stream_asks_each_so_many_lines_about_the_line_so_far_back(distance: int, every: int, first: int) -> None:
    reading = stream(language(), distance, every, 4, 0, 0)
    text = text_of(reading)
    told = re.findall(r"^line ([\w ]+): the number is (\d+)$", text, flags=re.MULTILINE)
    assert len(told) == lines(distance, every, 4) == first + 3 * every
    assert len({name for name, _ in told}) == len(told)
    for number, question in enumerate(reading.questions):
        read = first + number * every
        name, value = told[read - distance]
        before = text_of(reading, reading.ids[: question.end])
        assert before.endswith(f"What is the number in line {name}? line {name}: the number is")
        assert before.count("\nline ") + before.startswith("line ") == read
        assert question.expected == value
        assert text_of(reading, [reading.ids[at] for at in question.number]) == value
        assert before.index(f": the number is {value}\n") + len(": the number is ") == question.number[0]
    assert reading.questions[-1].end == len(reading.ids)


def test_a_true_answer_follows_its_question_in_the_stream() -> None:
    reading = stream(language(), 3, 3, 3, 0, 0)
    for question, _ in pairwise(reading.questions):
        assert text_of(reading, reading.ids[question.end :]).startswith(f" {question.expected}\nline ")


def test_a_distance_in_tokens_goes_from_the_number_to_its_answer() -> None:
    ends = [Question(100, (10, 11), "1"), Question(200, (130, 131), "2")]
    assert tokens_back(Reading((0,) * 200, tuple(ends))) == 80


def test_names_have_as_many_words_in_all_streams_compared() -> None:
    count = len(ENGLISH.nouns)
    told = text_of(stream(language(), 2, 2, 2, 0, 0)), text_of(stream(language(), 2, 2, 2, 0, count + 1))
    for text, words in zip(told, (1, 2), strict=True):
        assert all(len(each.split()) == words for each in re.findall(r"^line ([\w ]+):", text, flags=re.MULTILINE))


def test_a_full_cache_answers_as_the_model_alone(model: Any) -> None:
    reading = hidden(language(), PASSKEY, 700, 0.5, 3, 0)
    (answer,) = answered(model, DynamicCache(config=model.config), reading, None)
    ids = torch.tensor([reading.ids])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
    assert answer == Answer(own[0, 700:].tolist(), 1.0, 1)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("policy", [Window(), H2O(), SnapKV()], ids=lambda each: type(each).__name__)
def test_a_cache_that_holds_all_answers_as_the_full_one(model: Any, policy: Policy, chunk: int | None) -> None:
    for reading in (hidden(language(), LATE, 700, 0.5, 3, 0), stream(language(), 2, 2, 3, 0, 0)):
        full = list(answered(model, DynamicCache(config=model.config), reading, None))
        assert list(answered(model, SinkCache(model, policy, 1000, "original"), reading, chunk)) == full
        assert len(full) == len(reading.questions)


@pytest.mark.parametrize("make", [lambda model: SinkCache(model, StreamingLLM(4), 40), lambda model: DynamicCache()])
def test_what_is_answered_leaves_no_trace_in_the_stream(model: Any, make: Any) -> None:
    reading = stream(language(), 1, 1, 2, 0, 0)
    together = list(answered(model, make(model), reading, 1))
    for question, answer in zip(reading.questions, together, strict=True):
        alone = Reading(reading.ids[: question.end], (question,))
        assert list(answered(model, make(model), alone, 1)) == [answer]


def test_a_late_question_is_unknown_when_the_rest_is_evicted_from(model: Any) -> None:
    late, multi = (hidden(language(), task, 900, 0.5, 3, 0) for task in (LATE, MULTIKEY))
    spies = [Spy(), Spy()]
    for reading, spy in zip((late, multi), spies, strict=True):
        list(answered(model, SinkCache(model, spy, 600, "original"), reading, None))
    decided = [list(dict.fromkeys(spy.newest)) for spy in spies]
    assert decided[0][0] == late.pause - 1
    assert decided[1][0] == len(multi.ids) - 2
    seen = []
    for reading in (late, multi):
        cache = SinkCache(model, SnapKV(), 100, "original")
        list(answered(model, cache, reading, None))
        seen.append([cache.kept(layer)[0].tolist() for layer in range(2)])
    assert seen[0] != seen[1]


@pytest.mark.parametrize("chunk", [None, 7])
def test_the_window_holds_what_is_its_budget_from_the_end_and_no_more(model: Any, chunk: int | None) -> None:
    ids = hidden(language(), PASSKEY, 400, 0.5, 3, 0).ids
    for number, share, visible in (((300,), 1.0, 1), ((299,), 0.0, 0), ((298, 299, 300, 301), 0.5, 0)):
        reading = Reading(ids, (Question(400, number, "1"),))
        (answer,) = answered(model, SinkCache(model, Window(), 100), reading, chunk)
        assert (answer.share, answer.visible) == (share, visible)


def test_a_stream_holds_a_number_while_it_is_within_the_window(model: Any) -> None:
    for distance, visible in ((1, 1), (9, 0)):
        reading = stream(language(), distance, 3, 4, 0, 0)
        cache = SinkCache(model, StreamingLLM(num_sinks=4), 200)
        assert [each.visible for each in answered(model, cache, reading, 16)] == [visible] * 4


@pytest.mark.parametrize("policy", [H2O(), AdaKV(SnapKV())], ids=["H2O", "AdaKV"])
def test_what_is_held_is_counted_over_layers_and_heads(model: Any, policy: Policy) -> None:
    reading = hidden(language(), PASSKEY, 500, 0.5, 3, 0)
    cache = SinkCache(model, policy, 150, "original")
    list(answered(model, cache, reading, None))
    number, whole, parts = reading.questions[0].number, False, []
    for layer in range(2):
        for head in cache.kept(layer)[0].tolist():
            there = [at in head for at in number]
            parts.append(sum(there) / len(there))
            whole |= all(there)
    assert held(cache, number) == (pytest.approx(sum(parts) / len(parts)), int(whole))
    assert len(parts) == 4


def test_layers_that_keep_their_native_cache_are_left_out() -> None:
    hybrid: Any = build("gemma3", torch.float64, vocab_size=257, max_position_embeddings=4096)
    reading = hidden(language(), PASSKEY, 400, 0.1, 3, 0)
    (answer,) = answered(hybrid, SinkCache(hybrid, Window(), 100), reading, 16)
    assert (answer.share, answer.visible) == (0.0, 0)


def test_a_cell_scores_what_was_said_beside_what_was_expected(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [hidden(language(), PASSKEY, 600, 0.5, 3, seed) for seed in range(3)]
    wrong = readings[1].questions[0].expected

    def copied(network: Any, cache: Any, reading: Reading, chunk: int | None) -> list[Answer]:
        (question,) = reading.questions
        said = " 10000." if question.expected == wrong else f" {question.expected}."
        return [Answer(TOKENIZER(said)["input_ids"], 0.25, 0)]

    monkeypatch.setattr(cells, "loaded", lambda asked: model)
    monkeypatch.setattr(cells, "_tokenizer", lambda name, revision, weights: TOKENIZER)
    monkeypatch.setattr(cells, "answered", copied)
    asked = {"kind": "retrieval", "model": "m", "revision": None, "weights": "", "policy": None, "chunk": None}
    figures = cells.measure(Cell(cells.FUNCTION, asked, readings)).figures
    assert figures["hits"] == [1, 0, 1]
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["answers"][1] == " 10000."
    assert figures["expected"] == [each.questions[0].expected for each in readings]
    assert (figures["visible"], figures["held_share"]) == ([0, 0, 0], [0.25] * 3)
    assert figures["tokens"] == [len(each.ids) for each in readings]
