"""The tables of a contest: its figures with intervals, and its costs, each as headings and rows."""

import math
from collections.abc import Callable, Sequence

from experiments.page import Shown
from experiments.reports.bootstrap import DRAWS, FEW, Estimate
from experiments.reports.contest import BEST, BOUND, TIED, UNRANKED, Contest, Result, Spread

QUALITY = ("policy", "perplexity", "after evict.", "x full", "x best", "gap", "KL", "top-1", "recall", "MiB")
COST = ("policy", "MiB", "MiB, peak", "prefill, s", "ms/token", "tokens/s")
NONE = "-"
_SCARCE = 20  # stretches, from which an interval is about as wide as it should be
STANDING = {BEST: "best", TIED: "tied with the best", UNRANKED: "NOT RANKED", BOUND: "looks ahead", "": ""}
NOTES = (
    "Perplexity: of all tokens of all documents together. After evict.: of the tokens that are predicted after the "
    "first eviction; x full, x best, gap, KL and top-1 are of the same tokens. x full: over the perplexity of the "
    "full cache. x best: over that of the best policy; tied: the interval of that holds 1. Gap: the share of the way "
    "from StreamingLLM, or else the window, to the full cache, where these documents tell the two apart. KL: of the "
    "full cache's prediction from this one's, nats, mean. Top-1: how often both predict the same token. Recall: the "
    "share of the full cache's attention that falls on what is held. MiB: keys and values held, at most. Small below "
    "a figure: its 95% interval; below a cost: from the least document to the greatest. Clairvoyant looks ahead in "
    "the text: it is not ranked, and no bound on perplexity."
)


def fixed(value: float | None, digits: int = 2) -> str:
    """So many decimals, none from 1,000 on; "-" for none."""
    if value is None or math.isnan(value):
        return NONE
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """With one decimal, from a share."""
    return NONE if value is None or math.isnan(value) else f"{100 * value:.1f}%"


def quality(contest: Contest) -> tuple[list[str], list[list[Shown]]]:
    """Headings and a row for each line; without a column in which there is nothing."""
    rows = [
        [
            Shown(each.line.label, STANDING[each.standing], each.line.label),
            estimated(each.perplexity, fixed) if contest.of is None else Shown(NONE),
            estimated(each.after, fixed),
            estimated(each.ratio, three),
            estimated(each.to_best, three),
            estimated(each.gap, _whole_percent),
            estimated(each.kl, three),
            estimated(each.top1, percent),
            estimated(each.recall, three),
            _mib(each.bytes),
        ]
        for each in contest.results
    ]
    kept = [index for index in range(len(QUALITY)) if any(row[index].says != NONE for row in rows)]
    return [QUALITY[index] for index in kept], [[row[index] for index in kept] for row in rows]


def cost(contest: Contest) -> list[list[Shown]]:
    """A row for each line, under `COST`."""
    return [
        [
            Shown(each.line.label, "", each.line.label),
            _mib(each.bytes),
            _mib(each.bytes_peak),
            _spread(each, "prefill_seconds"),
            _spread(each, "ms_per_token"),
            _spread(each, "tokens_per_second"),
        ]
        for each in contest.results
    ]


def standings(contest: Contest) -> str:
    """Who is best, and who ties with it, in a sentence; empty where nobody is."""
    best = [each for each in contest.results if each.standing == BEST]
    ties = sorted(each.line.label for each in contest.results if each.standing == TIED)
    if not best:
        compared = [each for each in contest.results if each.to_best is not None]
        return "There is one stretch of one document: no interval, so nobody is named best." if compared else ""
    told = f"Best: {best[0].line.label}, perplexity {fixed(best[0].after.value)} after the first eviction"
    if not ties:
        return f"{told}; no other policy ties with it."
    verb = "tie" if len(ties) > 1 else "ties"
    return f"{told}; {', '.join(ties)} {verb} with it: these documents do not tell them apart."


def drawn(contest: Contest) -> str:
    """How the intervals were made, in a sentence."""
    count = len(contest.units.lengths)
    documents = f"{count} document{'s' * (count > 1)}, {contest.tokens.count:,} tokens"
    if not contest.units.by_stretch:
        return f"{documents}. Intervals: middle 95% of {DRAWS:,} draws of the documents, the same for all policies."
    narrow = ", and are too narrow for being of so few stretches" if contest.units.count < _SCARCE else ""
    return (
        f"{documents}. Intervals: middle 95% of {DRAWS:,} draws, the same for all policies, of the documents and of "
        f"{contest.units.count} stretches within them: fewer than {FEW} documents alone say little. They do not tell "
        f"how other documents would differ{narrow}. Recall is one figure a document, so it has no interval."
    )


def lacking(contest: Contest, failed: Sequence[str]) -> str:
    """Why there is no ratio to the full cache, where there is none."""
    full = [each.line for each in contest.results if each.line.method == "full"]
    missing = [name for name in contest.tokens.counted if not full or name not in full[0].cells]
    if not missing:
        return ""
    reason = f" ({'; '.join(failed)})" if failed else ""
    return f"x full and gap are {NONE} where the full cache was not measured: on {', '.join(sorted(missing))}{reason}."


def three(value: float | None) -> str:
    """With three decimals."""
    return fixed(value, 3)


def estimated(found: Estimate | None, say: Callable[[float | None], str]) -> Shown:
    """As a table shows it: the interval below."""
    if found is None or math.isnan(found.value):
        return Shown(NONE)
    return Shown(say(found.value), interval(found, say), found.value)


def interval(found: Estimate | None, say: Callable[[float | None], str]) -> str:
    """From where to where; empty without one, or where it is a point."""
    if found is None or found.low is None or found.low == found.high:
        return ""
    return f"{say(found.low)} to {say(found.high)}"


def _whole_percent(value: float | None) -> str:
    return NONE if value is None or math.isnan(value) else f"{100 * value:,.0f}%"


def _mib(count: float | None) -> Shown:
    return Shown(NONE) if count is None else Shown(fixed(count / 2**20), "", float(count))


def _spread(result: Result, name: str) -> Shown:
    found: Spread | None = result.costs.get(name)
    if found is None:
        return Shown(NONE)
    below = "" if found.low == found.high else f"{fixed(found.low)} to {fixed(found.high)}"
    return Shown(fixed(found.value), below, found.value)
