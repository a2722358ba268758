"""docs/user-cases.md names a test that exists, or a reason, for each case."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "user-cases.md").read_text().splitlines()
    if re.match(r"\| [A-Z]\d+ \|", line)
]
TEST = re.compile(r"`(tests/test_\w+\.py)::(test_\w+)`")


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_test_it_names_exists(row):
    missing = [f"{path}::{name}" for path, name in TEST.findall(row[-1]) if name not in names_in(path)]
    assert missing == []
    assert row[-1].count("::") == len(TEST.findall(row[-1]))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_case_has_a_thread_a_claim_and_a_test_or_a_reason(row):
    assert len(row) == 4
    case, thread, claim, proof = row
    assert thread
    assert claim
    assert TEST.search(proof) or len(proof.split()) >= 5, f"{case} has neither a test nor a reason"


def test_no_case_is_there_twice():
    assert [case for case, count in Counter(row[0] for row in ROWS).items() if count > 1] == []


def test_no_case_is_left_out_between_two_others():
    last: dict[str, int] = {}
    for case, *_ in ROWS:
        assert int(case[1:]) == last.get(case[0], 0) + 1
        last[case[0]] = int(case[1:])
    assert "".join(last) == "ABCDEFGHIJKLMNOPQRSTUVW"
    assert len(ROWS) == 136
