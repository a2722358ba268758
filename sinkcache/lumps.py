"""The ids of texts too long to be held: tokenised lump by lump, and the very ids of tokenising the whole."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from sinkcache.texts import BETWEEN, cut_before

LUMP = 1 << 18  # characters tokenised at once
_CONTEXT = 64  # characters of the lump before, at least, that a lump is tokenised behind


@dataclass(frozen=True)
class Part:
    """A piece of a text; `title` is the text's name in its first piece, and None in the others."""

    text: str
    title: str | None = None


@dataclass(frozen=True)
class Lump:
    """Consecutive ids, and which texts begin among them: the index of a text's first id in `ids`, its title."""

    ids: list[int]
    begins: list[tuple[int, str]]


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """The same pieces, with a blank line between two texts."""
    for number, part in enumerate(parts):
        if number and part.title is not None:
            yield Part(BETWEEN)
        yield part


def lumps(parts: Iterable[Part], tokenizer: PreTrainedTokenizerBase, size: int = LUMP) -> Iterator[Lump]:
    """The ids of `parts` put together, with the special tokens the tokenizer puts around the whole.

    What is held is a lump of `size` characters, and what no space ends. Cuts are where `tokenize` cuts, and each lump
    is tokenised behind the end of the one before, for tokenizers that treat the beginning of a text otherwise. Where a
    text begins is known of fast tokenizers alone. Raises ValueError if the tokenizer does not split at spaces.
    """
    opening, closing = _special(tokenizer)
    text, before, wanted = "", "", size
    begins: list[tuple[int, str]] = []
    for part in parts:
        if part.title is not None:
            begins.append((len(text), part.title))
        text += part.text
        while len(text) >= wanted:
            cut = cut_before(text, min(len(text), wanted))
            if cut == 0:
                wanted *= 2
                continue
            yield _lump(before, text[:cut], [each for each in begins if each[0] < cut], tokenizer, opening)
            begins = [(at - cut, title) for at, title in begins if at >= cut]
            before, text, wanted, opening = text[:cut], text[cut:], size, []
    last = _lump(before, text, begins, tokenizer, opening)
    yield Lump(last.ids + closing, last.begins)


def _lump(
    before: str, text: str, begins: list[tuple[int, str]], tokenizer: PreTrainedTokenizerBase, opening: list[int]
) -> Lump:
    context = before[before.rfind(" ", 0, max(0, len(before) - _CONTEXT)) + 1 :]
    for behind in (context, before):
        skipped, whole = _plain(behind, tokenizer), _encoded(behind + text, tokenizer)
        if whole["input_ids"][: len(skipped)] == skipped:
            shift, known = len(opening) - len(skipped), begins if tokenizer.is_fast else []
            starts = [(max(0, shift + _token_at(whole, len(behind) + at)), title) for at, title in known]
            return Lump(opening + whole["input_ids"][len(skipped) :], starts)
    raise ValueError(
        "this tokenizer does not split texts at spaces, so a long text cannot be tokenised in lumps: give fewer tokens"
    )


def _token_at(encoded: Any, at: int) -> int:
    """The token that holds character `at`, or else the first behind it."""
    while (token := encoded.char_to_token(at)) is None:
        if at > encoded.token_to_chars(len(encoded["input_ids"]) - 1).start:
            return len(encoded["input_ids"])
        at += 1
    return token


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Without special tokens; not verbose: a stream may outgrow the trained length."""
    return cast(Any, tokenizer)(text, add_special_tokens=False, verbose=False)


def _plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return _encoded(text, tokenizer)["input_ids"] if text else []


def _special(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    whole, plain = cast(Any, tokenizer)("a", verbose=False)["input_ids"], _plain("a", tokenizer)
    fits = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    at = fits[0] if fits else 0
    return whole[:at], whole[at + len(plain) :]
