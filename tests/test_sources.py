"""Long texts are read in pieces: files one after the other, rows as they are needed; their ids wait on disk."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from test_texts import CORPUS, TOKENIZERS

from experiments import sources
from experiments.sources import Source, of_dataset, of_files, of_text
from experiments.spool import spooled
from sinkcache.lumps import Part
from sinkcache.texts import Text, embedded, from_dataset, from_file, tokenize

TOKENIZER = TOKENIZERS["_byte_level"]


def whole(source: Source) -> str:
    return "".join(part.text for part in source.parts())


@pytest.fixture
def books(tmp_path: Path) -> list[str]:
    texts = {"a.txt": CORPUS[0][:9000], "b.txt": "Ünë\r\n" + CORPUS[0][9000:20_000], "c.txt": CORPUS[0][20_000:26_000]}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    return [str(tmp_path / name) for name in texts]


def test_one_file_is_what_from_file_makes_of_it(books, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 7)  # letters of two bytes are cut
    for book in books:
        source, text = of_files([book]), from_file(book)
        assert (source.name, whole(source), source.sha256) == (text.name, text.text, text.sha256)
        assert source.bytes == len(text.text.encode())


def test_files_are_joined_by_blank_lines(books):
    source = of_files(books)
    text = "\n\n".join(from_file(book).text for book in books)
    assert whole(source) == whole(source) == text
    assert source.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert source.name == "a.txt + b.txt + c.txt"
    assert of_files([*books, books[0]]).name == "a.txt and 3 more"


def test_byte_order_marks_are_no_text(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbfone")
    assert whole(of_files([str(tmp_path / "a"), str(tmp_path / "b")])) == "one\n\none"


@pytest.mark.parametrize("block", [1, 3, 4, 100])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_no_utf8_are_named_by_their_place(tmp_path, monkeypatch, block, mark):
    monkeypatch.setattr(sources, "_BLOCK", block)
    for text, at in (("naé".encode() + b"\xefve", 4), ("naé".encode()[:-1], 2)):
        (tmp_path / "latin.txt").write_bytes(mark + text)
        with pytest.raises(ValueError, match=f"is not UTF-8 at byte {len(mark) + at}:"):
            of_files([str(tmp_path / "latin.txt")])


def test_a_missing_file_is_named(tmp_path, books):
    with pytest.raises(ValueError, match=r"text file .*missing\.txt' cannot be read"):
        of_files([*books, str(tmp_path / "missing.txt")])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_spooled_ids_are_those_of_tokenize(kind, books, tmp_path):
    text = Text("", whole(of_files(books)), "")
    for tokens in (2, 500, 6000):
        spool = spooled(of_files(books), TOKENIZERS[kind], tokens, tmp_path)
        ids = tokenize(text, TOKENIZERS[kind], tokens)
        assert torch.equal(spool.read(0, tokens), ids)
        assert torch.equal(spool.read(1, tokens - 1), ids[:, 1:-1])
        assert spool.sha256 == hashlib.sha256(ids.numpy().tobytes()).hexdigest()
        assert spool.text_sha256 == of_files(books).sha256


def test_a_spool_says_where_texts_begin_and_leaves_no_file(books, tmp_path):
    before = sorted(tmp_path.iterdir())
    spool = spooled(of_files(books), TOKENIZER, 9000, tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    assert [title for _, title in spool.begins] == ["a.txt", "b.txt", "c.txt"]
    ids = spool.read(0, 9000)[0]
    assert str(TOKENIZER.decode(ids[spool.begins[1][0] :])).startswith("Ünë")
    one = spooled(of_files(books), TOKENIZER, 100, tmp_path)
    assert one.begins == [(0, "a.txt")]


def test_a_text_that_is_too_short_says_what_it_has(tmp_path):
    with pytest.raises(ValueError, match=r"'a test' has \d tokens, got --tokens 100"):
        spooled(of_text(Text("a test", "one two", "")), TOKENIZER, 100, tmp_path)


def test_the_embedded_text_is_a_source():
    assert whole(of_text(embedded())) == embedded().text


@pytest.fixture(params=["jsonl", "parquet"])
def dataset(request, tmp_path, monkeypatch) -> str:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: make venv")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = [{"text": CORPUS[0][3000 * number : 3000 * number + 3000], "number": number} for number in range(5)]
    (tmp_path / "data").mkdir()
    if request.param == "jsonl":
        (tmp_path / "data" / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data" / "test.parquet")
    return str(tmp_path / "data")


def test_rows_are_what_from_dataset_makes_of_them(dataset, tmp_path):
    source, text = of_dataset(dataset, None, "test", "text"), from_dataset(dataset)
    assert (source.name, whole(source)) == (text.name, text.text)
    spool = spooled(source, TOKENIZER, 4000, tmp_path)
    assert torch.equal(spool.read(0, 4000), tokenize(text, TOKENIZER, 4000))
    assert [title for _, title in spool.begins] == [f"row {number}" for number in range(len(spool.begins))]


def test_rows_are_fetched_as_they_are_needed(monkeypatch, tmp_path):
    fetched = []

    def rows(*_):
        for number in range(1000):
            fetched.append(number)
            yield {"text": CORPUS[0][:3000]}

    monkeypatch.setattr(sources, "rows_of", rows)
    spooled(of_dataset("any", None, "test", "text"), TOKENIZER, 2000, tmp_path)
    assert len(fetched) * 3000 <= 8 * 2000 + 3000


def test_a_wrong_column_lists_those_there_are(dataset, tmp_path):
    with pytest.raises(ValueError, match=r"no text column 'body': its text columns are \['text'\]"):
        spooled(of_dataset(dataset, None, "test", "body"), TOKENIZER, 10, tmp_path)


def test_a_source_is_read_anew_each_time():
    source = Source("x", lambda: iter([Part("a")]))
    assert whole(source) == whole(source) == "a"
