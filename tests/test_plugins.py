"""Policies by name: ours, those of a distribution that is on the path, and text that names them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY

import sinkcache.policies
from sinkcache import SinkCache, prefill
from sinkcache.cli import main
from sinkcache.plugins import found, listing, named, policies, qualified
from sinkcache.policies import H2O, KeyDiff, Phases, Protect, SnapKV, StreamingLLM, Window
from sinkcache.policy import Policy

Add = Callable[..., str]
MINE = '''
"""A stranger's, arXiv 2601.00001."""
from dataclasses import dataclass
from sinkcache import Policy
from sinkcache.policy import Watch

@dataclass(frozen=True)
class Mine(Policy):
    """Keeps what I like."""
    share: float = 0.5
    names: tuple[str, ...] = ("a",)

    def watch(self): return Watch(mass=True, values=True)
    def score(self, entries): return entries.positions.float()

@dataclass(frozen=True)
class Inner(Policy):
    held: Policy
    scale: float = 1.0

    def score(self, entries): return self.held.score(entries)

class Other: pass
'''


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`add(points, source)` puts a distribution of one module on the path; each has a module of its own."""
    before = set(sys.modules)
    made = []

    def install(points: str, source: str = MINE) -> str:
        folder = tmp_path / f"site{len(made)}"
        name = f"stranger{len(made)}_{tmp_path.name.replace('-', '_')}"
        info = folder / f"{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[sinkcache.policies]\n" + points.replace("MODULE", name) + "\n")
        monkeypatch.syspath_prepend(folder)
        made.append(name)
        return name

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("stranger"):
            del sys.modules[name]


def test_ours_are_there_by_name_and_a_plug_in_beside_them(add: Add) -> None:
    assert list(policies()) == sinkcache.policies.__all__
    name = add("Mine = MODULE:Mine\nrenamed = MODULE:Inner")
    known = policies()
    assert list(known) == [*sinkcache.policies.__all__, "Mine", "renamed"]
    assert len(known) == len(sinkcache.policies.__all__) + 2
    assert known["H2O"] is H2O
    assert qualified(known["Mine"]) == f"{name}.Mine"
    assert known["renamed"].__name__ == "Inner"
    with pytest.raises(KeyError):
        known["Other"]


def test_a_plug_in_is_imported_when_it_is_asked_for_and_not_before(add: Add) -> None:
    name = add("Mine = MODULE:Mine")
    assert "Mine" in policies()
    named("H2O(recent=3)")
    assert name not in sys.modules
    assert named("Mine(share=0.25)").share == 0.25  # type: ignore[attr-defined]
    assert name in sys.modules


def test_importing_the_library_imports_no_plug_in(tmp_path: Path, add: Add) -> None:
    name = add("Mine = MODULE:Mine")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site0')!r}); import sinkcache, sinkcache.cli;"
        f"from sinkcache.plugins import policies; assert 'Mine' in policies(); sys.exit({name!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ours_cannot_be_replaced(add: Add) -> None:
    name = add("H2O = MODULE:Mine")
    assert policies()["H2O"] is H2O
    assert type(named("H2O")) is H2O
    assert listing()[1] == [f"H2O = '{name}:Mine' of {name} 1.2 is hidden by the policy of sinkcache that has its name"]


def test_a_plug_in_that_does_not_import_is_an_error_only_when_asked_for(add: Add) -> None:
    name = add("Broken = MODULE:Mine", "import a_module_that_is_not_there")
    assert named("TOVA()") == sinkcache.policies.TOVA()
    for ask in (lambda: policies()["Broken"], lambda: named("Broken(3)"), lambda: found(f"{name}.Mine")):
        with pytest.raises(ValueError, match=f"'{name}:Mine' of {name} 1.2 cannot be imported .*a_module_that_is_not"):
            ask()


@pytest.mark.parametrize(("target", "got"), [("MODULE:Other", "Other"), ("MODULE", "module 'stranger")])
def test_a_plug_in_that_is_no_policy_is_an_error(add: Add, target: str, got: str) -> None:
    add(f"Mine = {target}")
    with pytest.raises(ValueError, match=f"is no subclass of sinkcache.Policy: got .*{got}"):
        policies()["Mine"]


def test_two_plug_ins_of_one_name_are_an_error_that_names_both(add: Add) -> None:
    names = add("Mine = MODULE:Mine"), add("Mine = MODULE:Mine")
    with pytest.raises(ValueError, match="2 plug-ins are named Mine") as error:
        named("Mine")
    assert all(f"of {name} 1.2" in str(error.value) for name in names)


# text


@pytest.mark.parametrize(
    "policy",
    [
        H2O(recent=64, num_sinks=4),
        H2O(half_life=2.5, reduce="mean"),
        StreamingLLM(0),
        Window(),
        Protect(Phases(SnapKV(8, recent=None), KeyDiff()), num_sinks=2),
    ],
    ids=repr,
)
def test_what_a_policy_prints_is_the_policy(policy: Policy) -> None:
    assert named(repr(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("H2O", H2O()),
        (" H2O (64,\n num_sinks = 4 )", H2O(64, 4)),
        ("Protect(H2O, -0)", Protect(H2O(), 0)),
        ("Phases(decode=H2O(), prefill=SnapKV)", Phases(SnapKV(), H2O())),
    ],
)
def test_a_policy_can_be_written_short(text: str, policy: Policy) -> None:
    assert named(text) == policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h3o", "no policy is named h3o: did you mean H2O?"),
        ("snapkv(4)", "did you mean SnapKV?"),
        ("Zebra", "no policy is named Zebra: there is H2O, RKV"),
        ("Protect(Keydif())", "no policy is named Keydif: did you mean KeyDiff?"),
        ("H2O(recnt=3)", "H2O has no field recnt: did you mean recent?"),
        ("H2O(zzz=3)", "H2O has no field zzz: there is recent, num_sinks"),
        ("Window(num_sinks=1)", "Window has no field num_sinks: it has none"),
        ("Window(3)", "Window has 0 fields, got 1"),
        ("H2O(1, recent=2)", "H2O got recent twice"),
        ("Protect(num_sinks=1)", "Protect needs policy: write Protect(policy, num_sinks=4, recent=32)"),
        ("Phases()", "Phases needs prefill and decode"),
        ("H2O(recent=-1)", "recent must be a whole number, 0 or more, got -1"),
        ("H2O(group=mean)", "group=mean is neither a literal nor a policy: a word is written in quotes"),
        ("H2O(*[1])", "one by one"),
        ("H2O(**{'recent': 1})", "one by one"),
        ("H2O(", "written as H2O(recent=64), got 'H2O('"),
        ("", "written as H2O(recent=64), got ''"),
        ("1 + 1", "written as"),
        ("H2O() or H2O()", "written as"),
        ("H2O(recent=__import__('os').getpid())", "a policy's name must be a word"),
        ("H2O(recent=exit())", "no policy is named exit"),
        ("H2O(recent=[x for x in ()])", "neither a literal nor a policy"),
        ("H2O(recent=(y := 3))", "neither a literal nor a policy"),
        ("H2O.__init__()", "a policy's name must be a word such as H2O, got H2O.__init__"),
        ("H2O()()", "a policy's name must be a word"),
        ("-" * 100_000 + "1", "written as"),
        ("(" * 300 + "H2O" + ")" * 300, "written as"),
        ("H2O\0", "written as"),
    ],
)
def test_a_mistake_in_the_text_says_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - what it says is looked for below, brackets and all
        named(text)
    assert said in str(error.value)


def test_a_value_of_another_kind_is_a_mistake_in_the_text() -> None:
    with pytest.raises(ValueError, match=r"H2O\(half_life='x'\) cannot be made: "):
        named("H2O(half_life='x')")


# files


def saved(model: Any, policy: Policy, path: Path) -> None:
    SinkCache(model, policy, 12).save(path)


@pytest.mark.parametrize(
    "policy",
    [
        Protect(KeyDiff(), 1, 2),
        Phases(SnapKV(2, 3), KeyDiff(1)),
        Protect(Protect(H2O(3), 0, 4), 1, 2),
        H2O(3, half_life=4),
    ],
    ids=["protect", "phases", "twice", "plain"],
)
def test_a_file_finds_the_policies_that_its_policy_holds(model: Any, policy: Policy, tmp_path: Path) -> None:
    cache = SinkCache(model("llama"), policy, 12)
    prefill(model("llama"), cache, torch.randint(1, VOCABULARY, (1, 20)))
    cache.save(tmp_path / "cache")
    loaded = SinkCache.load(tmp_path / "cache", model("llama"))
    assert loaded.policy == policy
    assert loaded.seen == cache.seen


def test_a_file_finds_plug_ins_alone_and_within_ours(model: Any, add: Add, tmp_path: Path) -> None:
    add("Mine = MODULE:Mine\nrenamed = MODULE:Inner")
    for text in ("Mine(names=('b', 'c'))", "Protect(Mine(share=0.25), 1, 2)", "renamed(Protect(Mine(), 1, 2), 2.0)"):
        saved(model("llama"), named(text), tmp_path / "cache")
        assert SinkCache.load(tmp_path / "cache", model("llama")).policy == named(text)


def test_a_file_whose_plug_in_is_not_installed_says_which(
    model: Any, add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add("Mine = MODULE:Mine")
    policy = named("Protect(Mine(), 1, 2)")
    saved(model("llama"), policy, tmp_path / "cache")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if "site0" not in each])
    said = rf"Protect\(num_sinks=1, policy=Mine\(.*\), recent=2\) \({name}.Mine\), which is not one of sinkcache.polic"
    with pytest.raises(ValueError, match=said):
        SinkCache.load(tmp_path / "cache", model("llama"))
    assert SinkCache.load(tmp_path / "cache", model("llama"), policy).policy == policy
    with pytest.raises(ValueError, match=r"got Protect.*: give the same"):
        SinkCache.load(tmp_path / "cache", model("llama"), Protect(policy.policy, 1, 3))  # type: ignore[attr-defined]


def test_a_file_whose_plug_in_has_become_another_says_so(model: Any, add: Add, tmp_path: Path) -> None:
    name = add("Mine = MODULE:Mine")
    saved(model("llama"), named("Mine"), tmp_path / "cache")
    module = tmp_path / "site0" / f"{name}.py"
    for source, said in (
        (MINE.replace("share:", "part:"), "which is not one of"),
        (MINE + "\n    def __post_init__(self): pass", "IndentationError"),
        (
            MINE.replace("    def watch", "    def __post_init__(self): raise ValueError('no')\n    def watch"),
            "made: no; or",
        ),
    ):
        module.write_text(source + "#" * len(said))  # another size: a file compiled within a second is not read again
        del sys.modules[name]
        with pytest.raises(ValueError, match=said):
            SinkCache.load(tmp_path / "cache", model("llama"))
        sys.modules.setdefault(name, sys)


# the command


def test_the_command_lists_a_plug_in_and_what_is_wrong_with_another(add: Add, capsys: Any) -> None:
    name = add("Mine = MODULE:Mine")
    broken = add("Broken = MODULE:Mine", "1 / 0")
    assert main(["policies"]) == 1
    out, err = capsys.readouterr()
    assert "Mine(share=0.5, names=('a',))\n  Keeps what I like.\n  reads attention of all queries, values; " in out
    assert f"arXiv 2601.00001; Mine = '{name}:Mine' of {name} 1.2" in " ".join(out.split())
    assert "Broken" not in out
    assert f"the plug-in Broken = '{broken}:Mine' of {broken} 1.2 cannot be imported (ZeroDivisionError" in err
