import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_cells import nlls, stream

from experiments.reports.analysis import analysed
from experiments.reports.bootstrap import DRAWS, FEW, Estimate, Units, mean
from experiments.reports.contest import BEST, BOUND, TIED, UNRANKED, Contest, Result
from experiments.reports.tables import standings


def only(folder: Path) -> Contest:
    """The contest of a run that has one budget and one model."""
    (part,) = analysed([folder]).parts
    (contest,) = part.contests
    return contest


def by_name(contest: Contest) -> dict[str, Result]:
    return {each.line.label: each for each in contest.results}


def perplexity(*nll: np.ndarray) -> float:
    """Token by token, in a loop."""
    total, count = 0.0, 0
    for one in nll:
        for value in one:
            if not math.isnan(value):
                total, count = total + float(value), count + 1
    return math.exp(total / count)


def test_perplexity_is_weighted_by_tokens(tmp_path: Path) -> None:
    for text, tokens, value in (("a", 1024, 3.0), ("b", 512, 2.0), ("c", 40, 4.0)):
        stream(tmp_path, "full", np.full(tokens, value), text)
    found = by_name(only(tmp_path))["full"].perplexity
    assert found.value == pytest.approx(14.887, abs=5e-4)
    assert found.value == pytest.approx(math.exp((1024 * 3 + 512 * 2 + 40 * 4) / (1024 + 512 + 40)), rel=1e-12)


def test_every_figure_is_that_of_a_loop_over_tokens(tmp_path: Path) -> None:
    full, mine, sinks = ({} for _ in range(3))
    kl, agree = {}, {}
    for seed, (text, tokens) in enumerate({"a": 300, "b": 170}.items()):
        full[text], mine[text] = nlls(tokens, seed), nlls(tokens, seed + 10, 3.1)
        sinks[text] = nlls(tokens, seed + 20, 3.4)
        kl[text], agree[text] = nlls(tokens, seed + 30, 0.2), (nlls(tokens, seed + 40) > 2).astype(float)
        stream(tmp_path, "full", full[text], text)
        recall = {"recall": 0.5 + 0.1 * seed}
        stream(tmp_path, "H2O", mine[text], text, kl[text], agree[text], figures=recall)
        stream(tmp_path, "StreamingLLM", sinks[text], text)
    got, first = by_name(only(tmp_path))["H2O"], 65
    after = {name: [values[first:] for values in one.values()] for name, one in (("full", full), ("mine", mine))}
    whole, own = perplexity(*after["full"]), perplexity(*after["mine"])
    anchor = perplexity(*(values[first:] for values in sinks.values()))
    assert got.perplexity.value == pytest.approx(perplexity(*mine.values()), rel=1e-12)
    assert got.after.value == pytest.approx(own, rel=1e-12)
    assert got.ratio is not None
    assert got.ratio.value == pytest.approx(own / whole, rel=1e-12)
    assert got.gap is not None
    assert got.gap.value == pytest.approx((anchor - own) / (anchor - whole), rel=1e-10)
    assert got.kl is not None
    assert got.kl.value == pytest.approx(np.concatenate([each[first:] for each in kl.values()]).mean(), rel=1e-12)
    assert got.top1 is not None
    assert got.top1.value == pytest.approx(np.concatenate([each[first:] for each in agree.values()]).mean(), rel=1e-12)
    assert got.recall is not None
    assert got.recall.value == pytest.approx((0.5 * 235 + 0.6 * 105) / 340, rel=1e-12)
    assert got.bits_per_byte is not None
    assert got.bits_per_byte.value == pytest.approx(math.log2(perplexity(*mine.values())) / 4, rel=1e-12)


@pytest.mark.parametrize("documents", [2, 6])
def test_intervals_are_those_of_a_slow_loop_over_the_same_draws(tmp_path: Path, documents: int) -> None:
    full, mine = {}, {}
    for seed in range(documents):
        text = f"text {seed}"
        full[text], mine[text] = nlls(200 + 60 * seed, seed), nlls(200 + 60 * seed, 50 + seed, 3.2)
        stream(tmp_path, "full", full[text], text)
        stream(tmp_path, "H2O", mine[text], text)
    contest = only(tmp_path)
    got = by_name(contest)["H2O"]
    pieces = []  # (nll of full, nll of mine) of each unit, after the first eviction
    for text in sorted(full):
        width = 128 if documents < FEW else len(full[text])
        for start in range(0, len(full[text]), width):
            one, other = full[text][start : start + width], mine[text][start : start + width]
            kept = [index for index in range(len(one)) if start + index >= 65]
            pieces.append(([float(one[index]) for index in kept], [float(other[index]) for index in kept]))
    ratios, values = [], []
    for weights in contest.units.weights:
        sums, count = [0.0, 0.0], 0.0
        for weight, (one, other) in zip(weights, pieces, strict=True):
            sums[0] += weight * sum(one)
            sums[1] += weight * sum(other)
            count += weight * len(one)
        values.append(math.exp(sums[1] / count))
        ratios.append(math.exp(sums[1] / count) / math.exp(sums[0] / count))
    assert contest.units.count == len(pieces)
    assert got.ratio is not None
    for found, drawn in ((got.ratio, ratios), (got.after, values)):
        assert found.low == pytest.approx(sorted_at(drawn, 0.025), rel=1e-9)
        assert found.high == pytest.approx(sorted_at(drawn, 0.975), rel=1e-9)
        assert found.low < found.value < found.high  # type: ignore[operator]


def sorted_at(values: list[float], share: float) -> float:
    """The quantile, interpolated, as it is taught at school."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = math.floor(place)
    return ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


def test_draws_are_of_documents_and_of_as_many_stretches_as_each_has() -> None:
    units = Units((700, 130, 128))
    assert [len(each) for each in units.starts] == [6, 2, 1]
    taken = np.stack([units.weights[:, :6].sum(1) / 6, units.weights[:, 6:8].sum(1) / 2, units.weights[:, 8]])
    assert (taken == taken.round()).all()  # whole documents
    assert (taken.sum(axis=0) == 3).all()
    assert len(units.weights) == DRAWS
    assert taken.mean(axis=1) == pytest.approx([1, 1, 1], abs=0.06)
    assert taken.std(axis=1) == pytest.approx([math.sqrt(2 / 3)] * 3, abs=0.06)  # binomial: 3 draws of 1/3
    once = units.weights[taken[0] == 1][:, :6]
    assert once.std() == pytest.approx(math.sqrt(5 / 6), abs=0.05)  # 6 draws of 1/6


def test_documents_alone_are_drawn_where_there_are_five() -> None:
    units = Units((700, 130, 128, 50, 60))
    assert units.count == 5
    assert (units.weights.sum(axis=1) == 5).all()
    assert Units((700, 130, 128, 50)).count == 6 + 2 + 1 + 1


def test_a_long_document_has_longer_stretches() -> None:
    units = Units((1_000_000,))
    assert units.count <= 512
    assert units.sums([np.ones(1_000_000)]).sum() == 1_000_000


def test_intervals_cover_as_often_as_they_say() -> None:
    inside = 0
    for seed in range(200):
        generator = np.random.default_rng(seed)
        values = [generator.normal(1.0, 1.0, size=40) for _ in range(12)]
        units = Units((40,) * 12)
        found = mean(units, units.sums(values), units.sums([np.ones(40)] * 12)).estimate(units)
        inside += found.contains(1.0)
    assert 0.86 <= inside / 200 <= 0.98  # 95%, less for there being 12 documents only


def test_equal_policies_tie_and_a_worse_one_does_not(tmp_path: Path) -> None:
    for seed in range(3):
        base, generator = nlls(900, seed), np.random.default_rng(70 + seed)
        stream(tmp_path, "full", base, f"text {seed}")
        for name, worse in (("H2O", 0.1), ("TOVA", 0.1), ("window", 0.6), ("Clairvoyant(256)", 0.0)):
            stream(tmp_path, name, base + generator.gamma(1.0, worse or 1e-3, size=900), f"text {seed}")
    contest = only(tmp_path)
    found = by_name(contest)
    assert {found["H2O"].standing, found["TOVA"].standing} == {BEST, TIED}
    assert found["window"].standing == ""
    assert found["Clairvoyant(256)"].standing == BOUND
    assert found["full"].standing == ""
    tied = next(each for each in ("H2O", "TOVA") if found[each].standing == TIED)
    assert f"{tied} ties with it" in standings(contest)


def test_pairing_tells_apart_what_separate_intervals_do_not(tmp_path: Path) -> None:
    for seed in range(6):
        base = nlls(400, seed, 1.0 + seed)  # documents differ by far more than policies
        stream(tmp_path, "full", base, f"text {seed}")
        stream(tmp_path, "H2O", base + 0.10, f"text {seed}")
        stream(tmp_path, "TOVA", base + 0.12, f"text {seed}")
    found = by_name(only(tmp_path))
    mine, theirs = found["H2O"].after, found["TOVA"].after
    assert mine.high > theirs.low  # type: ignore[operator]
    assert found["H2O"].standing == BEST
    assert found["TOVA"].standing == ""
    assert found["TOVA"].to_best is not None
    assert found["TOVA"].to_best.low == pytest.approx(math.exp(0.02), rel=1e-6)
    assert found["TOVA"].ratio is not None
    assert found["TOVA"].ratio.high == pytest.approx(math.exp(0.12), rel=1e-6)


def test_one_stretch_has_no_interval_and_no_best(tmp_path: Path) -> None:
    for name, worse in (("full", 0.0), ("H2O", 0.1), ("TOVA", 0.3)):
        stream(tmp_path, name, nlls(100, 0) + worse)
    contest = only(tmp_path)
    assert all(each.after.low is None for each in contest.results)
    assert {each.standing for each in contest.results} == {""}
    assert "nobody is named best" in standings(contest)


def test_a_sampled_recompute_is_compared_on_its_tokens_only(tmp_path: Path) -> None:
    nll = {name: nlls(400, seed) for seed, name in enumerate(("full", "H2O", "TOVA"))}
    sampled = nlls(400, 9)
    sampled[65:][np.arange(335) % 32 != 0] = np.nan
    for name, values in nll.items():
        stream(tmp_path, name, values)
    stream(tmp_path, "recompute 1/32", sampled, every=32, chunk=None)
    (part,) = analysed([tmp_path]).parts
    whole, few = part.contests
    assert whole.of is None
    assert set(by_name(whole)) == {"full", "H2O", "TOVA"}
    assert few.of == "recompute 1/32"
    scored = [index for index in range(65, 400) if (index - 65) % 32 == 0]
    assert few.tokens.count == len(scored) == 11
    for name, values in {**nll, "recompute 1/32": sampled}.items():
        assert by_name(few)[name].after.value == pytest.approx(perplexity(values[scored]), rel=1e-12)
    assert by_name(few)["recompute 1/32"].bits_per_byte is None


def test_a_token_that_one_policy_did_not_score_keeps_it_out_of_the_table(tmp_path: Path) -> None:
    hidden = nlls(300, 1)
    hidden[200] = np.nan
    for name, values in (("full", nlls(300, 0)), ("TOVA", nlls(300, 2)), ("H2O", hidden)):
        stream(tmp_path, name, values)
    (part,) = analysed([tmp_path]).parts
    whole, few = part.contests
    assert set(by_name(whole)) == {"full", "TOVA"}
    assert by_name(whole)["full"].perplexity.value == pytest.approx(perplexity(nlls(300, 0)), rel=1e-12)
    kept = [index for index in range(65, 300) if index != 200]
    assert by_name(few)["TOVA"].after.value == pytest.approx(perplexity(nlls(300, 2)[kept]), rel=1e-12)


def test_a_divergence_with_gaps_is_the_mean_of_what_is_known(tmp_path: Path) -> None:
    kl = nlls(300, 5, 0.1)
    kl[100:200] = np.nan
    stream(tmp_path, "full", nlls(300, 0))
    stream(tmp_path, "H2O", nlls(300, 1), kl=kl)
    found = by_name(only(tmp_path))["H2O"].kl
    assert found is not None
    assert found.value == pytest.approx(np.concatenate([kl[65:100], kl[200:]]).mean(), rel=1e-12)


def test_who_holds_more_is_shown_and_not_ranked(tmp_path: Path) -> None:
    for seed in range(2):
        stream(tmp_path, "full", nlls(400, seed), f"text {seed}")
        for name, worse, held in (("H2O", 0.3, 128.0), ("TOVA", 0.2, 128.0), ("SnapKV", 0.01, 160.0)):
            stream(tmp_path, name, nlls(400, seed) + worse, f"text {seed}", figures={"held": held})
    contest = only(tmp_path)
    found = by_name(contest)
    assert found["SnapKV"].standing == UNRANKED
    assert found["TOVA"].standing == BEST
    assert "SnapKV holds 160 entries of text 0 where the others hold 128, MORE" in contest.notes[0]
    assert "SnapKV" not in standings(contest)


def test_who_holds_less_is_ranked_and_named(tmp_path: Path) -> None:
    for name, worse, held in (("H2O", 0.3, 128.0), ("TOVA", 0.2, 128.0000001), ("SnapKV", 0.01, 96.0)):
        stream(tmp_path, name, nlls(400, 0) + worse, figures={"held": held})
    contest = only(tmp_path)
    assert by_name(contest)["SnapKV"].standing == BEST
    assert len(contest.notes) == 1
    assert "SnapKV holds 96 entries of one where the others hold 128, less" in contest.notes[0]


def test_who_lacks_a_document_is_not_ranked(tmp_path: Path) -> None:
    for text in ("easy", "hard"):
        base = nlls(400, 0, 1.0 if text == "easy" else 4.0)
        stream(tmp_path, "full", base, text)
        for name, worse in (("H2O", 0.2), ("TOVA", 0.3)):
            stream(tmp_path, name, base + worse, text)
    stream(tmp_path, "SnapKV", nlls(400, 0, 1.0) + 0.25, "easy")
    contest = only(tmp_path)
    found = by_name(contest)
    assert found["SnapKV"].after.value < found["H2O"].after.value  # of the easy one only
    assert found["SnapKV"].standing == UNRANKED
    assert found["H2O"].standing == BEST
    assert found["SnapKV"].ratio is not None
    assert found["SnapKV"].ratio.value == pytest.approx(math.exp(0.25), rel=1e-9)  # to full on the same document
    assert found["SnapKV"].gap is None
    assert "SnapKV lacks hard" in contest.notes[0]


def test_without_the_full_cache_there_is_no_ratio(tmp_path: Path) -> None:
    stream(tmp_path, "H2O", nlls(300, 0))
    stream(tmp_path, "StreamingLLM", nlls(300, 1))
    found = by_name(only(tmp_path))["H2O"]
    assert found.ratio is None
    assert found.gap is None


def test_costs_are_the_middle_document_and_the_ends(tmp_path: Path) -> None:
    for index, cost in enumerate((10.0, 30.0, 11.0)):
        stream(tmp_path, "H2O", nlls(300, index), f"text {index}", cost={"ms_per_token": cost})
    spread = by_name(only(tmp_path))["H2O"].costs["ms_per_token"]
    assert (spread.low, spread.value, spread.high) == (10.0, 11.0, 30.0)


def test_perplexity_beyond_all_numbers_is_shown_as_such(tmp_path: Path) -> None:
    stream(tmp_path, "full", nlls(300, 0))
    with np.errstate(over="ignore"):
        row = stream(tmp_path, "window", np.full(300, 800.0), figures={"perplexity": None, "perplexity_after": None})
    assert row["figures"]["perplexity"] is None
    (part,) = analysed([tmp_path]).parts
    found = by_name(part.contests[0])["window"]
    assert math.isinf(found.perplexity.value)
    assert found.perplexity.low is None


def test_forty_cells_take_seconds(tmp_path: Path) -> None:
    for document in range(4):
        for index in range(10):
            name = "full" if index == 0 else f"Policy{index}"
            stream(tmp_path, name, nlls(8192, 10 * document + index), f"text {document}")
    start = time.process_time()
    assert len(only(tmp_path).results) == 10
    assert time.process_time() - start < 5


def test_an_interval_holds_its_ends() -> None:
    assert Estimate(1.0, 1.0, 1.0).contains(1.0)
    assert Estimate(1.1, 1.0, 1.2).contains(1.0)
    assert not Estimate(1.1, 1.0001, 1.2).contains(1.0)
    assert not Estimate(1.0).contains(1.0)


def panels(folder: Path, *folders: Path) -> list[Any]:
    return [panel for part in analysed([folder, *folders]).parts for panel in part.group.panels]


def test_conditions_are_never_averaged_together(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"threads": 2}]
    changes.append({"versions": {"torch": "2.14.0"}})
    for index, change in enumerate([{}, *changes]):
        stream(tmp_path, "full", nlls(200, index), "a" if index else "b", **change)
    parts = analysed([tmp_path]).parts
    assert sorted(len(part.group.panels[0].documents) for part in parts) == [1, 1, 1, 1, 2]
    titles = [part.group.title for part in parts]
    assert len(set(titles)) == 5
    assert sum("device cuda" in title for title in titles) == 1


def test_settings_have_tables_of_their_own(tmp_path: Path) -> None:
    stream(tmp_path, "full", nlls(300, 0))
    for budget in (64, 100):
        for positions in ("cache", "original"):
            stream(tmp_path, "H2O", nlls(300, budget), budget=budget, positions=positions)
    stream(tmp_path, "H2O", nlls(300, 1), chunk=32)
    stream(tmp_path, "reread 64", nlls(300, 2), every=64, chunk=None)
    found = {
        (panel.setting.budget, panel.setting.positions, panel.setting.chunk): sorted(line.label for line in panel.lines)
        for panel in panels(tmp_path)
    }
    assert found == {
        (64, "cache", 16): ["H2O", "full", "reread 64"],
        (64, "cache", 32): ["H2O", "full", "reread 64"],
        (64, "original", 16): ["H2O", "full", "reread 64"],
        (100, "cache", 16): ["H2O", "full"],
        (100, "original", 16): ["H2O", "full"],
    }


def test_the_full_cache_of_the_same_chunk_is_taken(tmp_path: Path) -> None:
    for text in "abcdef":  # whatever the order of keys
        stream(tmp_path, "H2O", nlls(300, 1), text, chunk=32)
        for chunk in (16, 32, 64):
            stream(tmp_path, "full", nlls(300, 100 + chunk), text, chunk=chunk)
    (panel,) = panels(tmp_path)
    full = next(line for line in panel.lines if line.label == "full")
    assert [cell.asked["chunk"] for cell in full.cells.values()] == [32] * 6


def test_a_document_read_at_two_lengths_is_in_two_tables(tmp_path: Path) -> None:
    for tokens in (200, 400):
        stream(tmp_path, "H2O", nlls(tokens, 0))
    assert [panel.setting.tokens for panel in panels(tmp_path)] == [200, 400]


def test_policies_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for recent in (16, 32):
        stream(tmp_path, "H2O", nlls(300, recent), policy=f"H2O(recent={recent})")
    (panel,) = panels(tmp_path)
    assert sorted(line.label for line in panel.lines) == ["H2O: H2O(recent=16)", "H2O: H2O(recent=32)"]


@pytest.mark.parametrize(("chunk", "bos", "first"), [(16, None, 65), (40, None, 81), (40, 1, 80), (1, None, 65)])
def test_after_the_first_eviction_begins_with_the_chunk_that_finds_something_evicted(
    tmp_path: Path, chunk: int, bos: int | None, first: int
) -> None:
    nll = nlls(200, 0)
    for name in ("full", "H2O"):
        told = {"first_after": None if name == "full" else 64 + (bos is None)}
        stream(tmp_path, name, nll, chunk=chunk, bos=bos, figures=told)
    found = by_name(only(tmp_path))["H2O"].after
    assert found.value == pytest.approx(perplexity(nll[first:]), rel=1e-12)


def test_the_same_tokens_under_two_names_are_one_document(tmp_path: Path) -> None:
    for text, seed in (("one", 0), ("one 1", 0), ("one 2", 1)):
        stream(tmp_path, "full", nlls(100, seed), text, ids_sha256=str(seed), text_sha256="0")
    stream(tmp_path, "H2O", nlls(100, 0, 3.2), "one", ids_sha256="0", text_sha256="0")
    stream(tmp_path, "H2O", nlls(100, 1, 3.2), "one 2", ids_sha256="1", text_sha256="0")
    contest = only(tmp_path)
    assert contest.units.lengths == (100, 100)
    assert {len(each.line.cells) for each in contest.results} == {2}
    (note,) = analysed([tmp_path]).found.notes
    assert note.endswith("are the same tokens: one document")
