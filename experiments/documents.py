"""The documents that a model is measured on: stretches of texts, or ids as they are, of equal length."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sinkcache.texts import Text, tokenize

OF_IDS = 16  # rows taken from a file of ids, if not told another number


class Refused(ValueError):
    """What was asked for makes no sense with this text or model: nothing is measured."""


@dataclass(frozen=True)
class Document:
    """Tokens of a text, the `index`-th stretch of it; or `given`, ids as they are. `sha256` is the whole text's."""

    name: str
    sha256: str
    index: int = 0
    text: Text | None = field(default=None, repr=False)
    given: tuple[int, ...] = field(default=(), repr=False)

    def shorter_than(self, tokens: int) -> bool:
        """Whether that is certain before there is a tokenizer: none makes more tokens than there are bytes."""
        return tokens > (len(self.given) if self.text is None else len(self.text.text.encode()))

    def ids(self, tokenizer: PreTrainedTokenizerBase, tokens: int, bos: int | None) -> Int[Tensor, "1 kv_len"]:
        """`tokens` ids, `bos` the first of them if there is one. Raises Refused if that cannot be."""
        taken = tokens - (bos is not None)
        ids = self._all(tokenizer, taken)[:, self.index * taken :][:, :taken]
        if ids.shape[1] < taken:
            raise Refused(
                f"document {self.name!r} has {ids.shape[1]} tokens where {taken} are to be read: lower --tokens or "
                "--documents, or give a longer text"
            )
        return ids if bos is None else torch.cat([ids.new_full((1, 1), bos), ids], dim=1)

    def _all(self, tokenizer: PreTrainedTokenizerBase, taken: int) -> Int[Tensor, "1 kv_len"]:
        if self.text is None:
            ids = torch.tensor([self.given])
            known = max(len(tokenizer), int(tokenizer.vocab_size))
            if int(ids.max()) >= known or int(ids.min()) < 0:
                raise Refused(f"document {self.name!r} has ids that are none of the tokenizer's 0 to {known - 1}")
            return ids
        ids = tokenize(self.text, tokenizer, (self.index + 1) * taken + 2)
        first = tokenizer.bos_token_id
        return ids[:, 1:] if first is not None and int(ids[0, 0]) == first else ids  # BOS is the command's to say


def stretches(texts: Sequence[Text], count: int) -> list[Document]:
    """`count` documents from each text, one after the other."""
    return [
        Document(text.name if count == 1 else f"{text.name} {index + 1}", text.sha256, index, text)
        for text in texts
        for index in range(count)
    ]


def of_ids(path: str | Path, count: int | None = None) -> list[Document]:
    """The first rows of the ids in a JSON file: a list of lists, or under "ids". Raises ValueError if it is none."""
    try:
        content = Path(path).expanduser().read_bytes()
        rows = json.loads(content)
    except OSError as error:
        raise ValueError(f"file of ids {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"file of ids {str(path)!r} is not JSON: {error}") from error
    rows = rows.get("ids") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise ValueError(f'file of ids {str(path)!r} must hold a list of lists of ids, as it is or under "ids"')
    if not all(type(each) is int for row in rows for each in row):
        raise ValueError(f"file of ids {str(path)!r} holds something that is no id")
    sha256, name = hashlib.sha256(content).hexdigest(), Path(path).name
    chosen = rows[: count or OF_IDS]
    return [Document(f"{name} {index + 1}", sha256, given=tuple(row)) for index, row in enumerate(chosen)]
