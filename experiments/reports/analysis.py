"""Runs as a report shows them: by model and conditions, the contests of each budget and the tasks of retrieval."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.reports.contest import Contest, contests
from experiments.reports.groups import Group, groups
from experiments.reports.retrieval import Task, tasks
from experiments.reports.source import Found, called, read


@dataclass
class Part:
    """A model under one set of conditions. `families`: contests by budget, of tables alike in all else."""

    group: Group
    families: list[list[list[Contest]]]
    tasks: list[Task]

    @property
    def contests(self) -> list[Contest]:
        """All of them, in order."""
        return [contest for family in self.families for panel in family for contest in panel]


@dataclass
class Analysis:
    """All that a report says."""

    found: Found
    parts: list[Part]

    def failed(self, contest: Contest, part: Part) -> list[str]:
        """Why the full cache was not measured where it failed, of this model."""
        return [
            f"{called(row)}: {row['reason']}"
            for row in self.found.failed
            if row["asked"].get("method") == "full"
            and row["asked"].get("model") == part.group.conditions["model"]
            and row["asked"].get("text") in contest.tokens.counted
        ]


def analysed(folders: Sequence[str | Path]) -> Analysis:
    """The runs in `folders`, taken together. Raises Unusable if one of them is none."""
    found = read(folders)
    parts = [
        Part(group, [[contests(panel) for panel in family] for family in group.families()], tasks(group.retrieval))
        for group in groups(found.stream, found.retrieval, found.notes)
    ]
    return Analysis(found, parts)
