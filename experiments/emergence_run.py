"""Goes through checkpoints one after the other: each is loaded if something of it is not known yet, and let go."""

import argparse
import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import sinkcache
from experiments.documents import Document, Refused
from experiments.emergence_cells import DONE, FAILED, Store
from experiments.emergence_measure import MEASURE, SHUFFLED, Probe, control_ids, drawable, shuffle
from experiments.results import Row
from experiments.revisions import Downloads, Revision, Unavailable, weights_of
from experiments.subject import TYPES
from sinkcache.models import _reason, load

OF_CONTROLS = 4  # documents, at most, that a control is measured on
BUDGET = 256  # tokens; a quarter of a document that is not twice as long
VERSIONS = {each.__name__: str(each.__version__) for each in (sinkcache, torch, transformers)}


@dataclass(frozen=True)
class Cell:
    """A document, read as it is or, in the controls "random" and "repeated", stood in for."""

    asked: Row
    document: Document

    @property
    def control(self) -> str | None:
        """None for a plain document."""
        return self.asked["control"]


@dataclass(frozen=True)
class Job:
    """A checkpoint and its cells; where `weights` are None, `lacks` says why nobody can tell which they are."""

    revision: Revision
    cells: list[Cell]
    weights: str | None
    lacks: str | None


@dataclass(frozen=True)
class Outline:
    """What is known of a checkpoint before its weights are."""

    tokenizer: PreTrainedTokenizerBase
    tokens: int
    bos: int | None
    budget: int | None


class Run:
    """All checkpoints of a command. `tell` is called with what is going on, `advance` when a cell is filed."""

    def __init__(self, given: argparse.Namespace, store: Store, downloads: Downloads) -> None:
        self.given, self.store, self.downloads = given, store, downloads
        self.tell: Callable[[str], None] = lambda what: None
        self.advance: Callable[[], None] = lambda: None

    def plan(self, revisions: Sequence[Revision], documents: Sequence[Document]) -> list[Job]:
        """The jobs of a series, in order of steps; the last has the controls."""
        jobs = []
        for revision in revisions:
            self.tell(f"{revision.series} {revision.title}: which weights")
            weights, lacks = None, None
            try:
                weights = weights_of(revision)
            except Unavailable as error:
                lacks = str(error)
            controls = self.given.controls if revision == revisions[-1] else []
            jobs.append(Job(revision, list(self._cells(revision, documents, controls)), weights, lacks))
        return jobs

    def found(self, job: Job) -> list[Row | None]:
        """What is known of each cell."""
        return [self.store.find(cell.asked, job.weights) for cell in job.cells]

    def left(self, job: Job) -> list[Cell]:
        """The cells to be measured."""
        again = (None, FAILED) if self.given.retry_failed else (None,)
        pairs = zip(job.cells, self.found(job), strict=True)
        return [cell for cell, row in pairs if (row and row["status"]) in again]

    def check(self, jobs: Sequence[Job]) -> None:
        """Raises Refused if what is asked for makes no sense for the first checkpoint; no weights are loaded."""
        job = next((job for job in jobs if job.lacks is None and self.left(job)), None)
        if job is None:
            return
        try:
            outline = self._outline(job)
        except Refused:
            raise
        except Exception:  # is filed when it is this checkpoint's turn
            return
        for cell in self.left(job):
            self._ids(cell, outline)

    def measure(self, job: Job) -> int:
        """Files what is not known of a checkpoint, or why it cannot be; returns bytes deleted. Raises Refused."""
        left = self.left(job)
        try:
            if left:
                self._measure(job, left)
        finally:
            gc.collect()
            if self.given.device == "cuda":
                torch.cuda.empty_cache()
        if self.given.delete_weights and job.weights is not None:
            return self.downloads.delete(job.revision, job.weights)
        return 0

    def _measure(self, job: Job, left: list[Cell]) -> None:
        try:
            if job.lacks is not None:
                raise Unavailable(job.lacks)
            outline = self._outline(job)
            self.tell(f"{job.revision.series} {job.revision.title}: loading")
            model = self._loaded(job)
        except Refused:
            raise
        except Exception as error:  # whatever it is, the other checkpoints can be measured
            for cell in left:
                self._fail(job, cell, error)
            return
        for cell in left:
            if cell.control != SHUFFLED:
                self._cell(job, cell, outline, model)
        shuffle(model, self.given.seed)  # which spoils the weights, so at the end
        for cell in left:
            if cell.control == SHUFFLED:
                self._cell(job, cell, outline, model)

    def _cell(self, job: Job, cell: Cell, outline: Outline, model: PreTrainedModel) -> None:
        self.tell(f"{job.revision.series} {job.revision.title}: {cell.asked['document']}")
        start = time.perf_counter()
        try:
            ids = self._ids(cell, outline).to(self.given.device)
            budget = None if cell.control else outline.budget
            probe = Probe(self.given.first_query, cell.asked["segments"], budget, self.given.chunk)
            found = probe.measured(model, ids, outline.bos)
        except Refused:
            raise
        except Exception as error:  # whatever it is, the other cells can be measured
            self._fail(job, cell, error)
            return
        digest = hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()
        identity = {"weights": job.weights, "tokens": ids.shape[1], "ids_sha256": digest}
        self.store.add(cell.asked, identity, {"status": DONE, "reason": None, **found})
        self.store.note(cell.asked, time.perf_counter() - start, torch.get_num_threads())
        self.advance()

    def _fail(self, job: Job, cell: Cell, error: Exception) -> None:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in lines[0]:
            kind = "out of memory: "
        identity = {"weights": job.weights, "tokens": None, "ids_sha256": None}
        self.store.add(cell.asked, identity, {"status": FAILED, "reason": kind + lines[0]})
        self.advance()

    def _cells(self, revision: Revision, documents: Sequence[Document], controls: Sequence[str]) -> Iterator[Cell]:
        for document in documents:
            yield Cell(self._asked(revision, document, None, len(documents)), document)
        some = documents[:OF_CONTROLS]
        for control in controls:
            for index, document in enumerate(some):
                yield Cell({**self._asked(revision, document, control, len(some)), "number": index}, document)

    def _asked(self, revision: Revision, document: Document, control: str | None, documents: int) -> Row:
        given = self.given
        budget = None if given.no_perplexity or control else given.budget or "automatic"
        plain = {name: getattr(given, name) for name in ("tokens", "first_query", "bos", "chunk", "dtype", "device")}
        return {
            **{"series": revision.series, "revision": revision.title, "step": revision.step, "control": control},
            **{"document": document.name, "sha256": document.sha256, "index": document.index},
            **plain,
            "segments": max(1, given.segments // documents),
            "budget": budget,
            "seed": given.seed if control else None,
            "versions": VERSIONS,
            "measure": MEASURE,
        }

    def _outline(self, job: Job) -> Outline:
        source, name, given = job.revision.source, job.revision.name, self.given
        self.downloads.expect(job.revision, job.weights or "")
        try:
            config = AutoConfig.from_pretrained(source, revision=name)
            tokenizer = AutoTokenizer.from_pretrained(source, revision=name)
        except (OSError, ValueError) as error:
            raise Unavailable(_reason(source, name, error)) from error
        trained = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        tokens = min(given.tokens, trained or given.tokens)
        if tokens <= given.first_query:
            raise Refused(
                f"{job.revision.series} was trained on {trained} tokens, so has no query from --first-query "
                f"{given.first_query} on: lower it"
            )
        budget = given.budget or min(BUDGET, tokens // (4 if tokens <= 2 * BUDGET else 1))
        if budget + 1 >= tokens:
            raise Refused(f"--budget {budget} evicts nothing from the {tokens} tokens that {job.revision.series} reads")
        bos = cast("int | None", tokenizer.bos_token_id)
        if given.bos == "prepend" and bos is None:
            raise Refused(f"--bos prepend: the tokenizer of {job.revision.series} has no BOS token: use --bos none")
        return Outline(tokenizer, tokens, bos, None if given.no_perplexity else budget)

    def _ids(self, cell: Cell, outline: Outline) -> torch.Tensor:
        front = outline.bos if self.given.bos == "prepend" else None
        ids = cell.document.ids(outline.tokenizer, outline.tokens, front)
        if cell.control in (None, SHUFFLED):
            return ids
        first = outline.bos if int(ids[0, 0]) == outline.bos else None
        seed = 1000 * self.given.seed + cell.asked["number"]
        return control_ids(cell.asked["control"], drawable(outline.tokenizer), outline.tokens, seed, first)

    def _loaded(self, job: Job) -> PreTrainedModel:
        model, _ = load(job.revision.source, TYPES[self.given.dtype], job.revision.name, self.given.device)
        found = getattr(model.config, "_commit_hash", None)
        if job.revision.name is not None and found not in (None, job.weights):
            raise Unavailable(
                f"revision {job.revision.name!r} moved to commit {found} while it was measured: run again"
            )
        return model
