import csv
import html
import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas
import pytest
from report_cells import COMMAND, append, failed, grid, nlls, retrieval, stream
from rich.console import Console

from experiments.__main__ import experiments, main
from experiments.grid.cell import Cell, Found
from experiments.grid.store import Store
from experiments.page import Shown, sortable
from experiments.reports import command, tables
from experiments.reports.analysis import analysed
from experiments.reports.files import flat
from experiments.reports.source import Unusable, read
from experiments.reports.terminal import show
from experiments.reports.write import write

pytest.importorskip("matplotlib")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two budgets, two documents, a sampled recompute, retrieval and a failed cell; its report beside it."""
    folder = tmp_path_factory.mktemp("ran")
    grid(folder / "run", tokens=400)
    failed(folder / "run", "SnapKV", "the model <b>lacks</b> it", "book 0")
    for depth in (0.1, 0.9):
        for name in ("full", "H2O(recent=32)"):
            retrieval(folder / "run", name, [1, 0, 1], [1, 0, 1], depth=depth)
    write_report([folder / "run"], folder / "out")
    return folder


def write_report(folders: Sequence[Path], out: Path) -> Path:
    return write(analysed(folders), out)


def page_of(folder: Path, *more: Path) -> str:
    return write_report([folder, *more], folder / "out").read_text()


class Parsed(HTMLParser):
    """Every element's attributes, and the elements in their order."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class") or ""
        self.names.append(f"{tag}.{kind}" if kind else tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]


def test_the_page_makes_no_request(ran: Path) -> None:
    content = (ran / "out" / "report.html").read_text()
    found = Parsed(content)
    for tag, name, value in found.attributes:
        if name.startswith("xmlns"):
            continue  # names, not addresses
        assert not re.search(r"(https?:)?//", value), (tag, name, value)
        if name in ("src", "href", "xlink:href", "data", "poster", "action"):
            assert value.startswith(("#", "data:image/")), (tag, name, value)
    assert not {"link", "iframe", "img", "object", "base"} & set(found.names)
    for inner in re.findall(r"url\(([^)]*)\)", content):
        assert inner.strip("\"'").startswith("#"), inner
    assert "@import" not in content
    assert "default-src 'none'" in content
    script = content[content.index("<script>") : content.index("</script>")]
    assert not re.search(r"fetch|XMLHttp|import\(|WebSocket|http", script)


def test_below_each_table_and_figure_is_the_command_that_made_it(ran: Path) -> None:
    names = Parsed((ran / "out" / "report.html").read_text()).names
    shown = [name for name in names if name in ("table.sorts", "figure", "div.foot")]
    assert shown.count("table.sorts") == 6 + 1 + 1  # two of each budget, and of the sampled; retrieval; failed cells
    assert shown.count("figure") == 4 + 1
    for before, after in zip(shown[::2], shown[1::2], strict=True):
        assert before != "div.foot"
        assert after == "div.foot"
    content = (ran / "out" / "report.html").read_text()
    assert content.count(f"<pre>{html.escape(shlex.join(COMMAND))}</pre>") == 13
    assert content.count("sinkcache 0.1.0, torch 2.13.0, transformers 5.24.0; ") >= 12


def test_tables_say_each_figure_under_its_heading(ran: Path) -> None:
    (part,) = analysed([ran / "run"]).parts
    fields = {"perplexity": "perplexity", "after evict.": "after", "x full": "ratio", "x best": "to_best"}
    fields |= {"gap": "gap", "KL": "kl", "top-1": "top1", "recall": "recall"}
    for contest in part.contests:
        heads, rows = tables.quality(contest)
        assert ("perplexity" in heads) == (contest.of is None)
        for row, result in zip(rows, contest.results, strict=True):
            cells = dict(zip(heads, row, strict=True))
            assert cells["policy"].says == result.line.label
            assert cells["MiB"].order == result.bytes
            for head, field in fields.items():
                found = getattr(result, field)
                if head in cells:
                    assert cells[head].order == (None if found is None else found.value), head
                    assert bool(cells[head].below) == (found is not None and found.low != found.high), head
        for row, result in zip(tables.cost(contest), contest.results, strict=True):
            names = ("prefill_seconds", "ms_per_token", "tokens_per_second")
            assert [cell.order for cell in row[3:]] == [result.costs[name].value for name in names]
            assert [cell.order for cell in row[1:3]] == [result.bytes, result.bytes_peak]


def test_cells_of_two_commands_have_both_below(tmp_path: Path) -> None:
    stream(tmp_path, "full", nlls(200, 0), command=["python", "-m", "one", "a b"])
    stream(tmp_path, "H2O", nlls(200, 1), command=["python", "-m", "two"])
    content = page_of(tmp_path)
    assert "<pre>python -m one &#x27;a b&#x27;</pre><pre>python -m two</pre>" in content


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>&\"'"
    for name in ("full", bad):
        stream(tmp_path, name, nlls(200, len(name)), bad, model=bad, command=["python", bad])
    stream(tmp_path, "H2O", nlls(200, 0), bad, model=bad, positions=bad, dtype=bad, policy=bad)
    sampled = nlls(200, 1)
    sampled[100:110] = np.nan
    stream(tmp_path, "recompute " + bad, sampled, bad, model=bad, dtype=bad)
    failed(tmp_path, bad, bad, bad)
    retrieval(tmp_path, bad, [1, 0], [1, 0], task=bad, model=bad)
    content = page_of(tmp_path)
    assert content.count("<script>") == 1  # our own
    assert "alert(1)" in html.unescape(content)


def test_the_same_rows_make_the_same_bytes(ran: Path, tmp_path: Path) -> None:
    lines = (ran / "run" / "results.jsonl").read_text().splitlines(keepends=True)
    shutil.copytree(ran / "run" / "scores", tmp_path / "scores")
    (tmp_path / "results.jsonl").write_text("".join(reversed(lines)))  # written in another order
    write_report([tmp_path], tmp_path / "out")
    for name in ("report.html", "cells.csv", "summary.csv", "results.parquet"):
        assert (tmp_path / "out" / name).read_bytes() == (ran / "out" / name).read_bytes(), name


def test_failed_cells_are_named_with_their_reasons(ran: Path) -> None:
    content = (ran / "out" / "report.html").read_text()
    assert "1 cell failed" in content
    assert "the model &lt;b&gt;lacks&lt;/b&gt; it" in content
    assert "SnapKV on book 0, budget 64" in content


def test_a_full_cache_that_failed_is_why_there_is_no_ratio(tmp_path: Path) -> None:
    for name in ("H2O", "TOVA"):
        stream(tmp_path, name, nlls(300, len(name)))
    failed(tmp_path, "full", "out of memory")
    assert "x full and gap are - where the full cache was not measured: on one (full on one" in page_of(tmp_path)
    assert "out of memory)." in page_of(tmp_path)


def test_models_are_compared_in_what_may_be_compared(tmp_path: Path) -> None:
    for model, level in (("tiny", 3.0), ("small", 2.0)):
        for name in ("full", "H2O"):
            stream(tmp_path, name, nlls(300, 0, level), model=model)
    content = page_of(tmp_path)
    assert "their perplexities cannot be compared" in content
    assert "bits per byte" in content
    shutil.rmtree(tmp_path)
    stream(tmp_path, "full", nlls(300, 0))
    assert "cannot be compared" not in page_of(tmp_path)


def test_conditions_that_differ_are_named(tmp_path: Path) -> None:
    for threads in (1, 2):
        stream(tmp_path, "full", nlls(300, 0), threads=threads)
    content = page_of(tmp_path)
    assert "<h2>tiny (threads 1)</h2>" in content
    assert "<h2>tiny (threads 2)</h2>" in content
    assert "no figure is an average over two" in content


def test_the_summary_has_every_line_of_every_table(ran: Path) -> None:
    with open(ran / "out" / "summary.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    (part,) = analysed([ran / "run"]).parts
    stream_lines = [line for line in lines if line["kind"] == "stream"]
    assert len(stream_lines) == sum(len(each.results) for each in part.contests)
    for contest in part.contests:
        for result in contest.results:
            on, budget = contest.of or "all tokens", str(contest.panel.setting.budget)
            (line,) = [
                line
                for line in stream_lines
                if (line["on"], line["budget"], line["name"]) == (on, budget, result.line.label)
            ]
            assert float(line["after"]) == result.after.value
            assert float(line["after_low"]) == result.after.low
            assert line["standing"] == result.standing
    assert [line["accuracy"] for line in lines if line["kind"] == "retrieval"] == [str(4 / 6)] * 2


def test_parquet_has_a_row_for_each_cell_with_stable_names(ran: Path) -> None:
    table = pandas.read_parquet(ran / "out" / "results.parquet").set_index("key")
    rows = read([ran / "run"]).rows
    assert len(table) == len(rows) == 2 * (1 + 2 * 7) + 1 + 4
    for row in rows:
        told = table.loc[row["key"]]
        assert told["asked.name"] == row["asked"]["name"]
        if row["status"] == "done":
            assert told["asked.versions.torch"] == row["asked"]["versions"]["torch"]
        assert told["command"] == " ".join(COMMAND)
        if row["kind"] == "stream" and row["status"] == "done":
            assert told["figures.perplexity"] == row["figures"]["perplexity"]
            assert [list(each) for each in told["figures.curve"]] == row["figures"]["curve"]
        if row["kind"] == "retrieval":
            assert list(told["figures.hits"]) == row["figures"]["hits"]
    assert set(table.loc[table["status"] == "failed", "reason"]) == {"the model <b>lacks</b> it"}


def test_a_column_of_several_kinds_is_text_in_parquet(tmp_path: Path) -> None:
    row = stream(tmp_path, "full", nlls(200, 0))
    append(tmp_path, {**row, "key": "other", "asked": {**row["asked"], "revision": 3}})
    append(tmp_path, {**row, "key": "third", "asked": {**row["asked"], "revision": "main"}})
    write_report([tmp_path], tmp_path / "out")
    assert set(pandas.read_parquet(tmp_path / "out" / "results.parquet")["asked.revision"].dropna()) == {"3", '"main"'}


def test_the_csv_of_cells_has_the_same_columns(ran: Path) -> None:
    with open(ran / "out" / "cells.csv", newline="") as file:
        read_in = csv.DictReader(file)
        lines = {line["key"]: line for line in read_in}
    assert list(read_in.fieldnames or []) == sorted(read_in.fieldnames or [])
    assert list(pandas.read_parquet(ran / "out" / "results.parquet").columns) == read_in.fieldnames
    for row in read([ran / "run"]).rows:
        for name, value in flat(row).items():
            told = lines[row["key"]][name]
            assert told == ("" if value is None else json.dumps(value) if isinstance(value, list) else str(value))


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    stream(tmp_path, "full", nlls(200, 0))
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('\n[1, 2]\n{"key": 3}\n{"status": "done"}\n\n{"key": "cut sho')
    found = read([tmp_path])
    assert len(found.stream) == 1
    assert found.notes == [f"4 damaged lines of {tmp_path / 'results.jsonl'} passed over"]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("remove", "its scores are not there"),
        ("cut", "is damaged"),
        ("shorten", "of shape (199,), where 200 tokens were read"),
        ("hide", "scores 198 tokens, the row says 199"),
        ("change", "the row says"),
    ],
)
def test_scores_that_are_not_of_the_cell_leave_it_out(tmp_path: Path, harm: str, words: str) -> None:
    from safetensors.numpy import load_file, save_file

    stream(tmp_path, "full", nlls(200, 0))
    row = stream(tmp_path, "H2O", nlls(200, 1))
    path = tmp_path / "scores" / f"{row['key']}.safetensors"
    scores = load_file(path)
    if harm == "remove":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        changed = {"shorten": scores["nll"][:-1], "change": scores["nll"] + 1e-4, "hide": scores["nll"].copy()}[harm]
        if harm == "hide":
            changed[7] = np.nan
        save_file({**scores, "nll": np.ascontiguousarray(changed)}, path)
    found = read([tmp_path])
    assert [each.asked["name"] for each in found.stream] == ["full"]
    (note,) = found.notes
    assert note.startswith(f"H2O on one, budget 64, cache positions, chunk 16 (cell {row['key']}) is left out: ")
    assert words in note


def test_a_row_that_lacks_a_figure_is_left_out(tmp_path: Path) -> None:
    row = stream(tmp_path, "full", nlls(200, 0))
    append(tmp_path, {**row, "figures": {}})
    assert read([tmp_path]).notes[0].endswith("is left out: its figures lack scored")


def test_results_of_an_older_text_are_left_out_and_named(tmp_path: Path) -> None:
    for name in ("full", "H2O"):
        stream(tmp_path, name, nlls(200, 0), text_sha256="a" * 64, date="2026-01-02T00:00:00+00:00")
    stream(tmp_path, "full", nlls(200, 1), text_sha256="b" * 64, date="2026-01-03T00:00:00+00:00")
    stream(tmp_path, "full", nlls(200, 2), "another")
    found = read([tmp_path])
    assert sorted(each.asked["text_sha256"][0] for each in found.stream if each.asked["text"] == "one") == ["b"]
    assert len(found.stream) == 2
    (note,) = found.notes
    assert note.startswith("'one' has changed: 2 cells of its older text (SHA-256 aaaaaaaaaaaa) are left out, ")
    assert note.endswith("those of bbbbbbbbbbbb are shown")


def test_of_two_runs_with_one_cell_the_later_is_shown(tmp_path: Path) -> None:
    for folder, recall, date in (("a", 0.5, "2026-01-03"), ("b", 0.25, "2026-01-02")):
        stream(tmp_path / folder, "H2O", nlls(200, 0), figures={"recall": recall}, date=date)
    for order in (("a", "b"), ("b", "a")):
        found = read([tmp_path / folder for folder in order])
        assert [each.row["figures"]["recall"] for each in found.stream] == [0.5]
        assert "was measured twice, with other figures" in found.notes[0]


def test_a_cell_that_failed_elsewhere_does_not_hide_its_figures(tmp_path: Path) -> None:
    row = stream(tmp_path / "a", "H2O", nlls(200, 0))
    append(tmp_path / "b", {**row, "status": "failed", "figures": {}, "reason": "killed", "date": "2027-01-01"})
    for order in (("a", "b"), ("b", "a")):
        found = read([tmp_path / folder for folder in order])
        assert (len(found.stream), found.failed, found.notes) == (1, [], [])


def test_a_run_in_which_all_failed_has_a_report_of_that(tmp_path: Path) -> None:
    failed(tmp_path, "H2O", "out of memory")
    assert "out of memory" in page_of(tmp_path)
    assert pandas.read_parquet(tmp_path / "out" / "results.parquet")["reason"].tolist() == ["out of memory"]


def test_what_the_store_wrote_is_read(tmp_path: Path) -> None:
    made = stream(tmp_path / "made", "H2O", nlls(200, 0))
    store = Store(tmp_path / "run")
    with store.writing():
        cell = Cell(made["function"], made["asked"])
        nll = nlls(200, 0)
        store.add(
            cell, Found(made["figures"], {"nll": nll, "kl": nll * 0, "agree": nll * 0 + 1}, made["cost"]), COMMAND
        )
        store.fail(Cell(made["function"], {**made["asked"], "name": "TOVA"}), "too\nlarge", COMMAND)
    (found,) = read([tmp_path / "run"]).stream
    assert np.array_equal(found.nll, nll, equal_nan=True)
    assert [row["reason"] for row in read([tmp_path / "run"]).failed] == ["too large"]
    assert "too large" in page_of(tmp_path / "run")


def test_the_command_writes_beside_the_run_or_where_it_is_told(ran: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(ran / "run", tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").read_bytes() == (ran / "out" / "report.html").read_bytes()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "deep" / "out")]) == 0
    assert (tmp_path / "deep" / "out" / "report.html").exists()
    assert str(tmp_path / "deep" / "out" / "report.html") in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "nothing")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "has no results.jsonl" in said
    with pytest.raises(Unusable):
        write_report([tmp_path], tmp_path / "out")


def test_without_pyarrow_it_says_what_to_install(ran: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    real = command.importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "pyarrow" else real(name))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(ran / "run")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith('the report needs pyarrow: run `pip install "sinkcache[experiments]"`\n')


def test_what_was_there_stays_whole_if_writing_fails(ran: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    shutil.copytree(ran / "out", out)

    def full(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        write_report([ran / "run"], out)
    for name in ("report.html", "cells.csv", "summary.csv", "results.parquet"):
        assert (out / name).read_bytes() == (ran / "out" / name).read_bytes()


def test_the_terminal_shows_the_figures_in_a_hundred_columns(ran: Path) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    show(console, analysed([ran / "run"]))
    said = console.export_text()
    assert max(map(len, said.splitlines())) <= 100
    (part,) = analysed([ran / "run"]).parts
    for contest in part.contests:
        title = contest.panel.setting.title + (f": on the tokens that {contest.of} scored" if contest.of else "")
        table = said.split(f"{title}\n")[1].split("Best:")[0].splitlines()
        for result in contest.results:
            (line,) = [line for line in table if line[3:].startswith(f"{result.line.label} ")]
            assert f" {result.after.value:.2f} " in line
            assert line[0] == {"best": "*", "tied": "=", "bound": "^", "": " "}[result.standing]
    assert "Failed: SnapKV on book 0: the model <b>lacks</b> it" in said


def test_every_experiment_is_listed_with_a_line(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    found = experiments()
    assert "experiments.stream_perplexity" in found
    assert "experiments.page" not in found
    for name, line in found.items():
        assert line
        assert re.search(rf"^python -m {re.escape(name)} +{re.escape(line)}$", said, re.MULTILINE)


def test_a_table_sorts_by_numbers_and_words_with_nothing_last(tmp_path: Path) -> None:
    rows = [
        [Shown("b", "", "b"), Shown("10", "", 10.0)],
        [Shown("a", "", "a"), Shown("-", "")],
        [Shown("c", "", "c"), Shown("9", "", 9.0)],
        [Shown("d", "", "d"), Shown("inf", "", float("inf"))],
        [Shown("e", "", "e"), Shown("-2", "", -2.0)],
    ]
    assert clicked(tmp_path, rows, []) == ("bacde", [None, None])
    assert clicked(tmp_path, rows, [1]) == ("ecbda", [None, "ascending"])
    assert clicked(tmp_path, rows, [1, 1]) == ("dbcea", [None, "descending"])
    assert clicked(tmp_path, rows, [1, 0]) == ("abcde", ["ascending", None])
    assert clicked(tmp_path, rows, [0, 0]) == ("edcba", ["descending", None])


def clicked(folder: Path, rows: list[list[Shown]], clicks: list[int]) -> tuple[str, list[str | None]]:
    """The first letters of the rows, and what headings say, after clicks on headings in a browser."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to open the page in")
    from experiments.page import SCRIPT, SORTING, page

    doing = "".join(f"document.querySelectorAll('th button')[{index}].click();" for index in clicks)
    table = sortable("", ["name", "value"], rows)
    content = page("t", [table, f"<script>{SCRIPT}</script><script>{doing}</script>"], f"<style>{SORTING}</style>")
    (folder / "page.html").write_text(content)
    dumped = browse("--dump-dom", folder / "page.html")
    heads = re.findall(r'<th scope="col"[^>]*?(?: aria-sort="(\w+)")?><button', dumped)
    body = dumped[dumped.index("<tbody>") : dumped.index("</tbody>")]
    return "".join(re.findall(r"<tr><td[^>]*>(\w)", body)), [each or None for each in heads]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open the page in")
def test_a_browser_runs_the_report_without_a_complaint(ran: Path, tmp_path: Path) -> None:
    content = (ran / "out" / "report.html").read_text()
    doing = "<script>document.querySelectorAll('th button')[3].click();</script>"
    (tmp_path / "page.html").write_text(content.replace("</body>", f"{doing}</body>"))
    dumped = browse("--dump-dom", tmp_path / "page.html")
    assert dumped.count('<th scope="col" aria-sort="ascending">') == 1
    table = dumped[dumped.index("<tbody>") : dumped.index("</tbody>")]
    assert table.index("Clairvoyant") < table.index("StreamingLLM") < table.index("window")


def browse(what: str, path: Path) -> str:
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}"]
    asked = [CHROMIUM, *options, what, path.as_uri()]
    return subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout
