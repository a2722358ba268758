"""Prompts that hide numbers in prose, exactly so long and at such a depth, and ask for one of them.

`passkey` hides one number. `multikey` hides several, each with a name, and asks for that of one; so do `late`, where
all but the question is read, and evicted from, before the question is there, and `early`, where the question comes
before the prose as well. All is fixed by the seed; `late` is the very prompt of `multikey`.
"""

from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerBase

from experiments.retrieval.filler import Prose, Sentences
from experiments.retrieval.wording import Wording

PASSKEY, MULTIKEY, LATE, EARLY = "passkey", "multikey", "late", "early"
HIDING = (PASSKEY, MULTIKEY, LATE, EARLY)
_DIGITS = (10_000, 100_000)
_PROSE = 4  # of the shortest sentences: less may not come out at the length asked for


@dataclass(frozen=True)
class Question:
    """`end` tokens are read when the answer begins; the number `expected` stood at the positions `number`."""

    end: int
    number: tuple[int, ...]
    expected: str


@dataclass(frozen=True)
class Reading:
    """What is read through one cache, as ids; of these, `pause` are read and evicted from before others are there."""

    ids: tuple[int, ...]
    questions: tuple[Question, ...]
    pause: int = 0


@dataclass(frozen=True)
class Language:
    """How prompts are written for a model: its tokenizer, the words, and the sentences between them."""

    tokenizer: PreTrainedTokenizerBase
    wording: Wording
    sentences: Sentences

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing in front of them."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def start(self) -> list[int]:
        """What this tokenizer puts in front of a text."""
        first, bos = self.tokenizer("a", verbose=False)["input_ids"][:1], self.tokenizer.bos_token_id
        return first if bos is not None and first == [bos] else []

    def digits(self, number: list[int]) -> list[int]:
        """Which of a number's ids hold a digit: there may be a space. Raises ValueError if none does."""
        found = [at for at, one in enumerate(number) if any(each.isdigit() for each in self.tokenizer.decode([one]))]
        if not found:
            raise ValueError("the tokenizer has no tokens for digits, so that no number can be hidden or found")
        return found


def drawn(random: Random, count: int) -> list[str]:
    """Numbers of five digits, no two alike."""
    return [str(each) for each in random.sample(range(*_DIGITS), count)]


def hidden(language: Language, task: str, length: int, depth: float, keys: int, seed: int) -> Reading:
    """A prompt of `length` tokens whose number asked for stands after the share `depth` of its prose.

    Raises ValueError if `length` is too short for what must be said.
    """
    random, wording, count = Random(f"{seed} {task == PASSKEY}"), language.wording, 1 if task == PASSKEY else keys
    numbers, names = drawn(random, count), wording.names(count, random)
    others = [random.random() for _ in range(count - 1)]  # their depths
    if task == PASSKEY:
        opening, question, needle = wording.opening, wording.question, wording.needle
    else:
        opening, question, needle = wording.named_opening, wording.named_question, wording.named_needle
    asking = question.format(name=names[0])
    start = language.start() + language.encode((asking.strip() + "\n\n" if task == EARLY else "") + opening)
    end = language.encode(asking)
    needles = [_needle(language, needle, *each) for each in zip(names, numbers, strict=True)]
    room = length - len(start) - len(end) - sum(len(ids) for ids, _ in needles)
    prose = Prose(language.sentences(random), language.encode)
    if room < _PROSE * prose.shortest:
        least = length - room + _PROSE * prose.shortest
        raise ValueError(f"--length {length} is too short for {task}: it takes {least} tokens at least")
    order = sorted(range(count), key=lambda each: ([depth, *others][each], each))
    ends = [round([depth, *others][each] * room) for each in order]
    pieces = _pieces(prose, [end - before for before, end in zip([0, *ends], [*ends, room], strict=True)])
    ids, number = list(start), ()
    for piece, at in zip(pieces, order, strict=False):
        if at == 0:
            number = tuple(len(ids) + len(piece) + each for each in needles[0][1])
        ids += piece + needles[at][0]
    ids += pieces[-1]
    pause = len(ids) if task == LATE else 0
    return Reading((*ids, *end), (Question(len(ids) + len(end), number, numbers[0]),), pause)


def _needle(language: Language, needle: str, name: str, number: str) -> tuple[list[int], list[int]]:
    """The ids of a sentence, and which of them are the number's."""
    before, after = needle.format(name=name, number="\0").split(" \0")
    ids, digits = language.encode(before), language.encode(" " + number)
    return ids + digits + language.encode(after), [len(ids) + each for each in language.digits(digits)]


def _pieces(prose: Prose, sizes: list[int]) -> list[list[int]]:
    """Prose in pieces of nearly so many tokens; what the others lack of it is in the longest."""
    longest = sizes.index(max(sizes))
    pieces = [prose.take(size) if size >= prose.shortest and at != longest else [] for at, size in enumerate(sizes)]
    pieces[longest] = prose.take(sum(sizes) - sum(map(len, pieces)))
    return pieces
