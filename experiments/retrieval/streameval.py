"""StreamEval: lines that each give a number a name, and every few lines a question about the line so many back.

After Xiao et al., ICLR 2024, section 4.3 and table 7 (arXiv 2309.17453). One cache reads the whole stream. An answer is
generated from a copy of the cache, so that whatever is said, the stream goes on with the true answer after its
question, as a reader would who is told. Differs: the paper's data was not published; words and numbers are ours.
"""

from random import Random

from experiments.retrieval.prompts import Language, Question, Reading, drawn

STREAMEVAL = "streameval"


def lines(distance: int, every: int, questions: int) -> int:
    """Of the stream that has so many questions, one each `every` lines from the first that can be asked on."""
    return -(-distance // every) * every + every * (questions - 1)


def stream(language: Language, distance: int, every: int, questions: int, seed: int, most: int) -> Reading:
    """So many questions, each `every` lines, about the line `distance` lines back; 1 is the line just read.

    `most`: lines of the longest stream it is compared with, so that names are of as many words in all of them.
    """
    random, wording, count = Random(f"{seed} stream"), language.wording, lines(distance, every, questions)
    names, numbers = wording.names(max(count, most), random)[:count], drawn(random, count)
    ids, places, asked = language.start(), [], []
    for read, (name, number) in enumerate(zip(names, numbers, strict=True), start=1):
        before, after = wording.line.format(name=name, number="\0").split(" \0")
        digits = language.encode(" " + number)
        ids += language.encode(before)
        places.append(tuple(len(ids) + each for each in language.digits(digits)))
        ids += digits + language.encode(after)
        if read % every == 0 and read >= distance:
            back = read - distance
            ids += language.encode(wording.line_question.format(name=names[back]))
            asked.append(Question(len(ids), places[back], numbers[back]))
            ids += language.encode(" " + numbers[back] + wording.line_end)
    return Reading(tuple(ids[: asked[-1].end]), tuple(asked))


def tokens_back(reading: Reading) -> int:
    """From a number to where its answer begins, on average, in tokens."""
    return round(sum(each.end - each.number[0] for each in reading.questions) / len(reading.questions))
