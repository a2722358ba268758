"""Prose to hide a number in: whole sentences that make up so many tokens, without a digit among them."""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

from experiments.retrieval.wording import Wording
from sinkcache.texts import Text

Encode = Callable[[str], list[int]]
Sentences = Callable[[Random], Iterator[str]]

_POOL = 256  # sentences among which the last ones are looked for
_WORDS = range(4, 41)  # of a sentence that is taken from a text


def of_language(wording: Wording) -> Sentences:
    """Sentences of a language, none of them twice; they end when nearly all have been told."""

    def told(random: Random) -> Iterator[str]:
        known: set[str] = set()
        misses = 0
        while misses < _POOL:
            sentence = wording.sentence(random)
            misses = misses + 1 if sentence in known else 0
            if not misses:
                known.add(sentence)
                yield sentence

    return told


def of_text(text: Text) -> Sentences:
    """The sentences of a text from one of them on, those with digits left out; each once."""
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text.text))
    kept = list(dict.fromkeys(part for part in parts if len(part.split()) in _WORDS and not re.search(r"\d", part)))
    if not kept:
        raise ValueError(f"text {text.name!r} has no sentences without digits: give one that has")

    def told(random: Random) -> Iterator[str]:
        first = random.randrange(len(kept))
        yield from kept[first:] + kept[:first]

    return told


class Prose:
    """Sentences as ids, taken one after the other; only where a piece must end are they picked by their lengths."""

    def __init__(self, told: Iterator[str], encode: Encode) -> None:
        self.told, self.encode = told, encode
        self._ahead: list[list[int]] = []
        self._look()
        self.shortest = min(map(len, self._ahead))  # tokens

    def take(self, tokens: int) -> list[int]:
        """The ids of sentences, `tokens` in all; fewer, by less than a sentence, if no three add up to what is left.

        Raises ValueError if the sentences end before.
        """
        ids: list[int] = []
        while self._ahead and tokens - len(ids) >= 2 * max(map(len, self._ahead)):
            ids += self._ahead.pop(0)
            self._look()
        ids += self._closest(tokens - len(ids))
        if tokens - len(ids) >= max(map(len, self._ahead), default=1):
            raise ValueError(f"the sentences of the text end {tokens - len(ids)} tokens too early: give a longer one")
        return ids

    def _look(self) -> None:
        if len(self._ahead) <= _POOL // 2:
            self._ahead += [self.encode(" " + each) for each in islice(self.told, _POOL - len(self._ahead))]

    def _closest(self, tokens: int) -> list[int]:
        """The ids of up to three sentences that have so many tokens together, or as nearly as any, and never more."""
        by_length = {len(each): each for each in reversed(self._ahead)}
        sums: dict[int, list[list[int]]] = {0: []}
        for _ in range(3):
            for total, parts in list(sums.items()):
                for length, other in sorted(by_length.items()):
                    if total + length <= tokens and other not in parts:
                        sums.setdefault(total + length, [*parts, other])
            if tokens in sums:
                break
        chosen = sums[max(sums)]
        self._ahead = [each for each in self._ahead if each not in chosen]
        return [one for each in chosen for one in each]
