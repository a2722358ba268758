"""Texts say what they are, and their first tokens are those of the whole text."""

import hashlib
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import PreTrainedTokenizerFast

from sinkcache import texts
from sinkcache.texts import Text, tokenize

SPECIAL = ["<s>", "</s>", "<unk>"]
CORPUS = [texts.embedded().text[:60_000]]
CORPUS_WITH_CHINESE = [*CORPUS, "水 火 木 金 土"]


def _byte_level() -> Tokenizer:
    """As GPT-2, with digits apart as in SmolLM2."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _llama_3() -> Tokenizer:
    """Byte level, split by Llama 3's expression: a full stop and the line ends after it are one piece."""
    tokenizer = _byte_level()
    expression = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _llama_2() -> Tokenizer:
    """SentencePiece BPE over the whole text as one piece, with an opening token."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS_WITH_CHINESE, BpeTrainer(vocab_size=700, special_tokens=SPECIAL))
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def _t5() -> Tokenizer:
    """SentencePiece unigrams, with a closing token, which no beginning of a longer text may show."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = UnigramTrainer(vocab_size=700, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS_WITH_CHINESE, trainer)
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


TOKENIZERS = {
    make.__name__: PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    for make in (_byte_level, _llama_3, _llama_2, _t5)
}
words = st.sampled_from(["the", "a", "assert", "statement", "is", "it's", "é", "水", "1", "42", "x1", "don't", "..."])
spaces = st.sampled_from([" ", " ", " ", "", "  ", "   ", "\n", ".\n\n", "\n\n\n", " \n", ", ", "\t"])


def _text(text: str) -> Text:
    return texts._named("a test's text", text)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=300)
@given(pieces=st.lists(st.tuples(words, spaces), min_size=2, max_size=60), limit=st.integers(2, 20))
def test_first_tokens_are_those_of_the_whole_text(kind, pieces, limit):
    tokenizer = TOKENIZERS[kind]
    text = "".join(word + space for word, space in pieces)
    whole = tokenizer(text).input_ids
    assert texts._first_ids(text, tokenizer, limit) == whole[:limit]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_run_of_spaces_is_not_cut(kind):
    for count in range(1, 30):
        text = "the statement" + " " * count + "is a statement"  # 13 letters: two tokens and room for one space
        whole = TOKENIZERS[kind](text).input_ids
        for limit in range(2, 8):
            assert texts._first_ids(text, TOKENIZERS[kind], limit) == whole[:limit]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("limit", [2, 100, 1024, 30_000])
def test_first_tokens_of_prose_are_those_of_the_whole_text(kind, limit):
    text = _text(CORPUS[0])
    whole = tokenize(text, TOKENIZERS[kind])
    assert torch.equal(tokenize(text, TOKENIZERS[kind], limit), whole[:, :limit])


def test_tokenises_a_beginning_alone(monkeypatch):
    given_lengths = []
    all_ids = texts._all_ids

    def counting(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        given_lengths.append(len(text))
        return all_ids(text, tokenizer)

    monkeypatch.setattr(texts, "_all_ids", counting)
    assert tokenize(_text(CORPUS[0]), TOKENIZERS["_byte_level"], 100).shape == (1, 100)
    assert max(given_lengths) <= 1000 < len(CORPUS[0])


def test_text_without_spaces_is_tokenised_whole():
    text = "水" * 500
    tokenizer = TOKENIZERS["_byte_level"]
    assert texts._first_ids(text, tokenizer, 10) == tokenizer(text).input_ids[:10]


def test_short_text_gives_what_it_has():
    tokenizer = TOKENIZERS["_byte_level"]
    assert tokenize(_text("1 2"), tokenizer, 100).tolist() == [tokenizer("1 2").input_ids]


@pytest.mark.parametrize("text", ["", "1"])
def test_fewer_than_two_tokens_is_an_error(text):
    with pytest.raises(ValueError, match=rf"\"a test's text\" has {len(text)} token"):
        tokenize(_text(text), TOKENIZERS["_byte_level"])


def test_limit_below_two_tokens_is_an_error():
    with pytest.raises(ValueError, match="limit must be at least 2 tokens, got 1"):
        tokenize(_text("1 2 3"), TOKENIZERS["_byte_level"], 1)


def test_embedded_text_is_prose_and_names_its_python():
    text = texts.embedded()
    assert text == texts.embedded()
    assert len(text.text) > 400_000
    assert re.fullmatch(r"Python 3\.\d+\.\d+\S* reference", text.name)
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()


def test_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_bytes("Ünë\r\ntwo".encode())
    assert texts.from_file(path) == Text("novel.txt", "Ünë\r\ntwo", hashlib.sha256(path.read_bytes()).hexdigest())


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "novel.txt").write_bytes(b"\xef\xbb\xbfone")
    assert texts.from_file(tmp_path / "novel.txt").text == "one"


def test_unreadable_file_is_named(tmp_path):
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(ValueError, match=f"text file {str(path)!r} cannot be read"):
            texts.from_file(path)


def test_file_in_another_encoding_says_where(tmp_path):
    (tmp_path / "latin.txt").write_bytes("na\xefve".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8 at byte 2"):
        texts.from_file(tmp_path / "latin.txt")


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> str:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: make venv")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = [{"text": f"row {number}", "number": number} for number in range(5)]
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return str(tmp_path)


def test_dataset_rows_are_joined_by_blank_lines(dataset):
    text = texts.from_dataset(dataset)
    assert text.text == "row 0\n\nrow 1\n\nrow 2\n\nrow 3\n\nrow 4"
    assert text.name == f"{dataset}/test"


@pytest.mark.parametrize(("characters", "rows"), [(1, 1), (5, 1), (6, 2), (1000, 5)])
def test_dataset_is_read_no_further_than_needed(dataset, characters, rows):
    text = texts.from_dataset(dataset, characters=characters)
    assert text.text == "\n\n".join(f"row {number}" for number in range(rows))


@pytest.mark.parametrize("column", ["number", "body"])
def test_wrong_column_lists_those_there_are(dataset, column):
    with pytest.raises(ValueError, match=rf"no text column '{column}': its text columns are \['text'\]"):
        texts.from_dataset(dataset, column=column)


def test_unknown_split_or_dataset_is_named(dataset):
    for name, split in ((dataset, "validation"), (dataset + "/missing", "test"), ("nobody/nothing", "test")):
        with pytest.raises(ValueError, match=f"dataset '{name}/{split}' cannot be read") as caught:
            texts.from_dataset(name, split=split)
        assert "\n" not in str(caught.value)


def test_characters_below_one_is_an_error():
    with pytest.raises(ValueError, match="characters must be at least 1"):
        texts.from_dataset("any", characters=0)
