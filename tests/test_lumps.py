"""A text tokenised lump by lump has the ids of the whole, and where texts begin among them is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_texts import CORPUS, TOKENIZERS, spaces, words

from sinkcache import lumps as module
from sinkcache.lumps import Part, joined, lumps


def ids(parts, tokenizer, size):
    return [each for lump in lumps(parts, tokenizer, size) for each in lump.ids]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.tuples(words, spaces), max_size=60), size=st.integers(1, 40), part=st.integers(1, 30))
def test_ids_are_those_of_the_whole(kind, pieces, size, part):
    text = "".join(word + space for word, space in pieces)
    parts = [Part(text[at : at + part]) for at in range(0, len(text), part)]
    assert ids(parts, TOKENIZERS[kind], size) == TOKENIZERS[kind](text).input_ids


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("size", [100, 1000, 7777, 100_000])
def test_ids_of_prose_are_those_of_the_whole(kind, size):
    text = CORPUS[0]
    parts = [Part(text[:12_345], "one"), Part(text[12_345:40_000]), Part(text[40_000:], "two")]
    whole = text[:40_000] + "\n\n" + text[40_000:]
    assert ids(joined(parts), TOKENIZERS[kind], size) == TOKENIZERS[kind](whole).input_ids


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("size", [90, 5000])
def test_a_text_begins_at_the_token_of_its_first_letter(kind, size):
    tokenizer, texts = TOKENIZERS[kind], [f"{name}{CORPUS[0][at : at + 700]}" for at, name in enumerate("qzkj")]
    begins, read = [], []
    for lump in lumps(joined(Part(text, text[0]) for text in texts), tokenizer, size):
        begins += [(len(read) + at, title) for at, title in lump.begins]
        read += lump.ids
    assert [title for _, title in begins] == list("qzkj")
    for at, title in begins:
        assert str(tokenizer.decode(read[at : at + 2])).strip(" ▁").startswith(title)


@pytest.mark.parametrize("size", [5, 17, 33, 50])
def test_a_text_that_begins_behind_a_cut_is_where_it_is(size):
    tokenizer, parts = TOKENIZERS["_byte_level"], [Part(f"{word} one two three ", word) for word in "qzkj"]
    begins, read = [], []
    for lump in lumps(parts, tokenizer, size):
        begins += [len(read) + at for at, _ in lump.begins]
        read += lump.ids
    assert [str(tokenizer.decode(read[at : at + 1])).strip()[0] for at in begins] == list("qzkj")


def test_no_more_is_read_or_tokenised_than_a_lump_needs(monkeypatch):
    given_lengths, taken = [], []
    encoded = module._encoded

    def counting(text, tokenizer):
        given_lengths.append(len(text))
        return encoded(text, tokenizer)

    def parts():
        for number in range(100):
            taken.append(number)
            yield Part(CORPUS[0][100 * number : 100 * number + 100])

    monkeypatch.setattr(module, "_encoded", counting)
    first = next(iter(lumps(parts(), TOKENIZERS["_byte_level"], 1000)))
    assert len(first.ids) > 100
    assert len(taken) == 10
    assert max(given_lengths) <= 1000


def test_text_without_spaces_is_one_lump():
    assert len(list(lumps([Part("水" * 50)] * 10, TOKENIZERS["_byte_level"], 100))) == 1


def test_a_tokenizer_that_does_not_split_at_spaces_is_refused(monkeypatch):
    tokenizer = TOKENIZERS["_byte_level"]
    real = module._encoded
    monkeypatch.setattr(module, "_encoded", lambda text, tokenizer: real(text[::-1], tokenizer))
    with pytest.raises(ValueError, match="does not split texts at spaces"):
        list(lumps([Part(CORPUS[0][:5000])], tokenizer, 1000))
