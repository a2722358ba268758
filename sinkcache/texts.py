"""Texts to stream through a cache: the embedded one, a file, or a dataset; and their first tokens."""

import hashlib
import importlib.util
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

BETWEEN = "\n\n"  # two texts that follow one another
_MIN_TOKENS = 2  # one to read, one to predict


@dataclass(frozen=True)
class Text:
    """A text, the name figures give it, and the SHA-256 of its UTF-8 bytes."""

    name: str
    text: str = field(repr=False)
    sha256: str


def embedded() -> Text:
    """The language reference inside every CPython: about 465,000 characters of English prose.

    The same wherever the Python is the same. Releases revise the wording, so figures from two Pythons compare only if
    their `sha256` agree.
    """
    text = BETWEEN.join(topics.topics[topic].strip() for topic in sorted(topics.topics))
    return _named(f"Python {platform.python_version()} reference", text)


def from_file(path: str | Path) -> Text:
    """The UTF-8 text in the file at `path`, line ends as they are, without a byte-order mark.

    Raises ValueError if the file cannot be read or is not UTF-8.
    """
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"text file {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text file {str(path)!r} is not UTF-8 at byte {error.start}: convert it, as with `iconv -t utf-8`"
        ) from error
    return _named(Path(path).name, text)


def from_dataset(
    name: str,
    config: str | None = None,
    split: str = "test",
    column: str = "text",
    characters: int | None = None,
) -> Text:
    """The rows of a dataset's text column joined by blank lines, fetched through `datasets` as they are needed.

    `characters` stops at the first row that reaches that many; None reads the split to its end. Raises ValueError if
    there is no such dataset, config, split or column, ModuleNotFoundError without the package `datasets`.
    """
    if characters is not None and characters < 1:
        raise ValueError(f"characters must be at least 1, or None for all of them, got {characters}")
    label = label_of(name, config, split)
    parts = list(_column(rows_of(name, config, split), column, characters, label))
    return _named(label, BETWEEN.join(parts))


def label_of(name: str, config: str | None, split: str) -> str:
    """What figures call a dataset."""
    return "/".join(part for part in (name, config, split) if part)


def rows_of(name: str, config: str | None, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a dataset, fetched as they are needed. Raises as `from_dataset` does."""
    if importlib.util.find_spec("datasets") is None:
        raise ModuleNotFoundError(
            f"dataset {name!r} needs the package 'datasets': run `pip install \"sinkcache[experiments]\"`"
        )
    from datasets import load_dataset  # optional, and slow to import
    from datasets.exceptions import DatasetsError

    try:
        yield from load_dataset(name, config, split=split, streaming=True)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"dataset {label_of(name, config, split)!r} cannot be read: {first_line} (check name, config and split, or "
            "use a text file instead)"
        ) from error


def column_of(row: dict[str, Any], column: str, label: str) -> str:
    """The text of a row. Raises ValueError, and says which columns have text, if `column` has none."""
    if not isinstance(row.get(column), str):
        strings = [key for key, value in row.items() if isinstance(value, str)]
        raise ValueError(f"dataset {label!r} has no text column {column!r}: its text columns are {strings}")
    return row[column]


def _column(rows: Iterable[dict[str, Any]], column: str, characters: int | None, label: str) -> Iterator[str]:
    """The strings under `column`, up to the row that completes `characters`."""
    read = 0
    for row in rows:
        text = column_of(row, column, label)
        yield text
        read += len(text)
        if characters is not None and read >= characters:
            return


def _named(name: str, text: str) -> Text:
    return Text(name, text, hashlib.sha256(text.encode("utf-8")).hexdigest())


def tokenize(text: Text, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> Int[Tensor, "1 kv_len"]:
    """The first `limit` tokens of `text`, fewer if it has fewer, with the special tokens the tokenizer puts in front.

    The ids are those of tokenising the whole text, at the cost of tokenising a beginning of it: the text is cut only
    between a letter and a space, where a tokenizer that splits at spaces at all splits too. Raises ValueError if there
    are fewer than two.
    """
    if limit is not None and limit < _MIN_TOKENS:
        raise ValueError(f"limit must be at least {_MIN_TOKENS} tokens, got {limit}")
    ids = _all_ids(text.text, tokenizer) if limit is None else _first_ids(text.text, tokenizer, limit)
    if len(ids) < _MIN_TOKENS:
        raise ValueError(
            f"text {text.name!r} has {len(ids)} token(s) and a stream needs at least {_MIN_TOKENS}: give a longer text"
        )
    return torch.tensor([ids], dtype=torch.int64)


def _all_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(text, verbose=False)["input_ids"]  # not verbose: a stream may outgrow the trained length


def _first_ids(text: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[int]:
    """The first `limit` ids, from beginnings of `text` that double until they hold enough."""
    length = 5 * limit  # characters; English has 3 to 5 a token
    while length < len(text):
        ids = _all_ids(text[: cut_before(text, length)], tokenizer)
        if len(ids) - tokenizer.num_special_tokens_to_add() >= limit:  # else a closing token could be among them
            return ids[:limit]
        length *= 2
    return _all_ids(text, tokenizer)[:limit]


def cut_before(text: str, length: int) -> int:
    """The last place up to `length` between a letter and a space, 0 if there is none."""
    cut = text.rfind(" ", 0, length)
    while cut > 0 and not text[cut - 1].isalpha():
        cut = text.rfind(" ", 0, cut)
    return max(cut, 0)
