"""Where a command is: a bar in a terminal, and a line for each checkpoint anywhere."""

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text as Styled

from experiments.measure import Told
from experiments.summary import number


class Bar:
    """A bar over the tokens of all runs, `total` of them in each; also right in a run that goes on from a checkpoint.

    `run` begins the next run, `tell` says how far it is; a checkpoint is a line.
    """

    def __init__(self, console: Console, runs: int, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            _Speed(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self.runs, self.total, self.number = runs, total, 0
        self._task = self.progress.add_task("", total=runs * total, now="")
        self._name, self._saved, self._begun = "", 0, time.monotonic()
        self._first: int | None = None  # where the run under way began

    def run(self, name: str) -> None:
        """The next run begins."""
        self.number, self._name = self.number + 1, name
        self._first, self._saved, self._begun = None, 0, time.monotonic()
        described = f"{self.number}/{self.runs} {name}"
        self.progress.update(self._task, completed=(self.number - 1) * self.total, description=described, now="")

    def tell(self, told: Told) -> None:
        """The run under way has come so far; what a checkpoint holds when it begins is no work of now."""
        completed, saved = (self.number - 1) * self.total + told.upto, self._saved
        self._saved = told.saved
        if self._first is None:
            self._first = told.saved
            if told.saved:
                self.progress.reset(self._task, completed=completed, total=self.runs * self.total)
                self.say(f"{self._name}: goes on from token {told.upto:,} of {self.total:,}")
        elif told.saved != saved:
            self._checkpoint(told)
        now = f"perplexity {number(told.perplexity)}, {told.held / 2**20:.1f} MiB"
        self.progress.update(self._task, completed=completed, now=now)

    def say(self, line: str) -> None:
        """A line above the bar."""
        self.progress.console.print(line, highlight=False, soft_wrap=True)

    def _checkpoint(self, told: Told) -> None:
        speed = (told.upto - (self._first or 0)) / max(1e-9, time.monotonic() - self._begun)
        left = timedelta(seconds=round((self.total - told.upto) / max(speed, 1e-9)))
        self.say(
            f"{self._name}: checkpoint at token {told.upto:,} of {self.total:,}, perplexity of the newest stretch "
            f"{number(told.perplexity)}, {told.held / 2**20:.2f} MiB held, {speed:,.0f} tokens/s, {left} left"
        )


class _Speed(TextColumn):
    """Tokens of the text a second, of late."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Styled:
        """The speed, or a dash before it is known."""
        return Styled(f"{task.speed:,.0f} tokens/s" if task.speed else "- tokens/s", style="cyan")
