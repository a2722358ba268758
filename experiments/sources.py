"""Where a long text comes from: files one after the other, or a dataset's rows, read as they are needed."""

import codecs
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sinkcache.lumps import Part, joined
from sinkcache.texts import Text, column_of, label_of, rows_of

_BLOCK = 1 << 20  # bytes of a file read at once
_NAMED = 3  # files named in a figure's text


@dataclass(frozen=True)
class Source:
    """A text that `parts` reads anew from its beginning each time; `name` is what figures call it.

    `sha256` is of all its UTF-8 bytes and `bytes` their number; None where they are not known before it is read.
    """

    name: str
    parts: Callable[[], Iterator[Part]]
    sha256: str | None = None
    bytes: int | None = None


def of_text(text: Text) -> Source:
    """A text that is there already."""
    return Source(text.name, lambda: iter([Part(text.text, text.name)]), text.sha256, len(text.text.encode()))


def of_files(paths: Sequence[str]) -> Source:
    """UTF-8 files joined by blank lines, line ends as they are, without byte-order marks.

    Reads them once. Raises ValueError if one cannot be read or is not UTF-8.
    """
    names = [Path(path).name for path in paths]
    named = " + ".join(names) if len(names) <= _NAMED else f"{names[0]} and {len(names) - 1} more"

    def parts() -> Iterator[Part]:
        return joined(part for path in paths for part in _pieces(path))

    digest, size = hashlib.sha256(), 0
    for part in parts():
        piece = part.text.encode()
        digest.update(piece)
        size += len(piece)
    return Source(named, parts, digest.hexdigest(), size)


def of_dataset(name: str, config: str | None, split: str, column: str) -> Source:
    """The rows of a dataset's text column joined by blank lines, fetched as they are read."""
    label = label_of(name, config, split)

    def parts() -> Iterator[Part]:
        rows = enumerate(rows_of(name, config, split))
        return joined(Part(column_of(row, column, label), f"row {number}") for number, row in rows)

    return Source(label, parts)


def _pieces(path: str) -> Iterator[Part]:
    decoder, title, done = codecs.getincrementaldecoder("utf-8")(), Path(path).name, 0
    try:
        with Path(path).expanduser().open("rb") as file:
            done = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
            file.seek(done)
            yield Part("", title)
            while block := file.read(_BLOCK):
                text = decoder.decode(block)
                done = file.tell() - len(decoder.getstate()[0])  # a character cut by the block's edge is not done
                yield Part(text)
            decoder.decode(b"", final=True)
    except OSError as error:
        raise ValueError(f"text file {path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text file {path!r} is not UTF-8 at byte {done + error.start}: convert it, as with `iconv -t utf-8`"
        ) from error
