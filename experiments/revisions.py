"""The checkpoints of a model's training, revisions of a hub id or folders; and which weights each is, before loading.

Weights go by the commit of a hub id and by a hash of a folder's files, so a result can be told to be of these weights
while they are on no disk any more.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from experiments.whole import put
from sinkcache.models import EMBEDDED, _reason

SIZES = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b")
STEPS = (0, 16, 64, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 143000)
TOKENS_PER_STEP, WARM_UP = 2_097_152, 1430  # of Pythia: a batch, and the step from which the learning rate falls
_STEP = re.compile(r"(?:step|checkpoint|iter)[-_]?(\d+)|^(\d+)$", re.IGNORECASE)


@dataclass(frozen=True)
class Revision:
    """A checkpoint after `step` steps: `name` is a revision of the hub id `source`, None if that is a folder."""

    series: str
    source: str
    name: str | None
    step: int

    @property
    def title(self) -> str:
        """What this checkpoint is called within its series."""
        return self.name or Path(self.source).name


class Unavailable(ValueError):
    """The hub, or a folder, has no such weights for us; one line on why."""


class Unreachable(Unavailable):
    """The hub does not answer, so nobody knows."""


def step_of(name: str) -> int:
    """The training step in a revision's name. Raises ValueError if there is none."""
    found = _STEP.search(name)
    if found is None:
        raise ValueError(
            f"revision {name!r} names no training step, as step512 or checkpoint-512 do: give each revision's --steps"
        )
    return int(found[1] or found[2])


def preset(name: str) -> list[Revision]:
    """The 13 checkpoints of "pythia-SIZE" that are measured if none are named."""
    size = name.removeprefix("pythia-")
    if size not in SIZES or size == name:
        raise ValueError(f"preset {name!r} is none of {', '.join('pythia-' + each for each in SIZES)}")
    return [Revision(name, f"EleutherAI/{name}", f"step{step}", step) for step in STEPS]


def listed(model: str, names: Sequence[str], steps: Sequence[int] = ()) -> list[Revision]:
    """Revisions of a hub id, or folders in a folder; without `names` the folder itself. Raises ValueError."""
    folder = Path(model).expanduser()
    local = folder.is_dir()
    if not names and not local:
        raise ValueError(f"--model {model} needs --revisions, such as step0,step512, or is no folder")
    if steps and len(steps) != max(1, len(names)):
        raise ValueError(f"--steps gives {len(steps)} numbers for {max(1, len(names))} revisions: one for each")
    if model == EMBEDDED:
        raise ValueError(f"{EMBEDDED} has no checkpoints of its training")
    known = steps or [step_of(each) for each in names or [folder.resolve().name]]
    series = folder.resolve().name if local else model.split("/")[-1]
    if not local:
        return ordered(Revision(series, model, name, step) for name, step in zip(names, known, strict=True))
    places = [folder / name for name in names] if names else [folder]
    return ordered(Revision(series, str(place), None, step) for place, step in zip(places, known, strict=True))


def ladder(folder: str) -> list[Revision]:
    """The folders `step0`, `step16` and so on in `folder`. Raises ValueError if it has none."""
    place = Path(folder).expanduser()
    names = [each.name for each in place.glob("step*") if each.is_dir() and _STEP.fullmatch(each.name)]
    if not names:
        raise ValueError(f"ladder {folder!r} has no folders step0, step16 and so on")
    return listed(str(place), names)


def ordered(revisions: Iterable[Revision]) -> list[Revision]:
    """The same by step. Raises ValueError if two have one step."""
    found = sorted(revisions, key=lambda each: each.step)
    for before, after in pairwise(found):
        if before.step == after.step:
            raise ValueError(
                f"{before.series}: revisions {before.title} and {after.title} are both of step {after.step}"
            )
    return found


def weights_of(revision: Revision) -> str:
    """The commit, or the hash of a folder's files; no weights are downloaded.

    Raises Unreachable if the hub does not answer and the cache has no such revision, else Unavailable.
    """
    if revision.name is None:
        return _fingerprint(Path(revision.source))
    name = revision.name
    try:
        url = huggingface_hub.hf_hub_url(revision.source, "config.json", revision=name)
        found = huggingface_hub.get_hf_file_metadata(url, token=huggingface_hub.get_token())
        if found.commit_hash:
            return found.commit_hash
        error: Exception = OSError(f"{url} names no commit")
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as refused:
        raise Unavailable(_reason(revision.source, name, refused)) from refused
    except Exception as unknown:  # of the hub's client: which there are differs between its versions
        error = unknown
    held = huggingface_hub.try_to_load_from_cache(revision.source, "config.json", revision=name)
    if isinstance(held, str):
        return Path(held).parent.name
    raise Unreachable(
        f"model {revision.source!r}, revision {name!r}, is not on this machine and the hub cannot be reached (no "
        "network, or HF_HUB_OFFLINE is set)"
    ) from error


class Downloads:
    """The commits that this command brought into the hub's cache, and may delete again; remembered in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commits: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def expect(self, revision: Revision, commit: str) -> None:
        """To be called before anything of a revision is downloaded: from then on it is ours, unless it is there."""
        if revision.name is not None and commit not in self.commits and not _snapshot(revision, commit).exists():
            self._keep([*self.commits, commit])

    def delete(self, revision: Revision, commit: str) -> int:
        """Takes a revision out of the hub's cache if we brought it there; returns the bytes this freed."""
        if revision.name is None or commit not in self.commits or not _snapshot(revision, commit).exists():
            return 0
        strategy = huggingface_hub.scan_cache_dir().delete_revisions(commit)
        freed = strategy.expected_freed_size
        strategy.execute()
        self._keep([each for each in self.commits if each != commit])  # who brings it back owns it
        return freed

    def _keep(self, commits: list[str]) -> None:
        self.commits = commits
        put(self.path, json.dumps(sorted(commits), indent=1) + "\n")


def _snapshot(revision: Revision, commit: str) -> Path:
    repository = "models--" + revision.source.replace("/", "--")
    return Path(huggingface_hub.constants.HF_HUB_CACHE) / repository / "snapshots" / commit


def _fingerprint(folder: Path) -> str:
    """A hash of the files that a model and its tokenizer are read from."""
    kinds = (".json", ".safetensors", ".bin", ".txt", ".model", ".jinja")
    digest = hashlib.sha256()
    files = sorted(each for each in folder.glob("*") if each.suffix in kinds)
    if not (folder / "config.json").is_file():
        raise Unavailable(f"folder {str(folder)!r} holds no model: it has no config.json")
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with open(file, "rb") as opened:
            while block := opened.read(2**20):
                digest.update(block)
    return digest.hexdigest()[:16]
