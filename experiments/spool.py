"""The ids of a text on disk, so that a stream of millions of them takes no memory: read a piece at a time."""

import hashlib
import tempfile
import weakref
from pathlib import Path
from typing import cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from experiments.sources import Source
from sinkcache.lumps import LUMP, lumps

_CHARACTERS = 8  # of a text tokenised at once per token asked for, at most
_ID = np.dtype("<u4")


class Spool:
    """Ids in a file that is gone when the process is; `begins` says at which tokens the texts among them begin.

    `sha256` is that of the ids as int64, `text_sha256` that of the text's UTF-8 bytes.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the spool
        weakref.finalize(self, self._file.close)
        self._ids = hashlib.sha256()
        self.tokens = 0
        self.begins: list[tuple[int, str]] = []
        self.text_sha256 = ""

    @property
    def sha256(self) -> str:
        """The hash of the ids so far."""
        return self._ids.hexdigest()

    def add(self, ids: list[int]) -> None:
        """Appends ids."""
        self._ids.update(np.asarray(ids, dtype="<i8").tobytes())
        self._file.seek(0, 2)
        self._file.write(np.asarray(ids, dtype=_ID).tobytes())
        self.tokens += len(ids)

    def read(self, start: int, stop: int) -> Int[Tensor, "1 q_len"]:
        """The ids from number `start` to before number `stop`, both within what there is."""
        assert 0 <= start <= stop <= self.tokens
        self._file.seek(start * _ID.itemsize)
        piece = np.frombuffer(self._file.read((stop - start) * _ID.itemsize), dtype=_ID)
        return torch.from_numpy(piece.astype(np.int64))[None]


def spooled(source: Source, tokenizer: PreTrainedTokenizerBase, tokens: int, folder: Path) -> Spool:
    """The first `tokens` ids of a text, without BOS. Raises ValueError if it has fewer."""
    spool, digest = Spool(folder), hashlib.sha256()
    bos = cast("int | None", tokenizer.bos_token_id)

    def read():
        for part in source.parts():
            digest.update(part.text.encode())
            yield part

    for lump in lumps(read(), tokenizer, min(LUMP, max(1024, _CHARACTERS * tokens))):
        ids, shift = lump.ids, spool.tokens
        if spool.tokens == 0 and ids and ids[0] == bos and tokenizer.num_special_tokens_to_add():
            ids, shift = ids[1:], -1  # whether there is a BOS is the run's to say
        spool.begins += [(max(0, at + shift), title) for at, title in lump.begins if at + shift < tokens]
        spool.add(ids[: tokens - spool.tokens])
        if spool.tokens == tokens:
            break
    if spool.tokens < tokens:
        raise ValueError(
            f"text {source.name!r} has {spool.tokens} tokens, got --tokens {tokens}: lower it or give a longer text"
        )
    spool.text_sha256 = source.sha256 or digest.hexdigest()
    return spool
