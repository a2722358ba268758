"""Policies by name: those of `sinkcache.policies`, and those that installed distributions add.

A distribution adds a policy by an entry point of the group `sinkcache.policies`, whose name is the policy's:
`[project.entry-points."sinkcache.policies"]` and `Mine = "my_package:Mine"` in its pyproject.toml. Nothing of it is
imported before that policy is asked for.
"""

import ast
import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import sinkcache.policies
from sinkcache.policy import Policy, Watch

GROUP = "sinkcache.policies"
_OURS: dict[str, type[Policy]] = {name: getattr(sinkcache.policies, name) for name in sinkcache.policies.__all__}


class Policies(Mapping[str, type[Policy]]):
    """Policy classes by name, ours first, none of which a plug-in can replace; a plug-in is imported when looked up.

    Looking up raises KeyError for a name that nobody has; ValueError, naming the plug-in, if it cannot be imported, is
    no policy, or two of them have the name.
    """

    def __init__(self) -> None:
        self.points: dict[str, list[EntryPoint]] = {}
        self.hidden: list[EntryPoint] = []  # by a policy of ours that has the name
        for point in sorted(entry_points(group=GROUP), key=lambda each: (each.name, each.value)):
            if point.name in _OURS:
                self.hidden.append(point)
            else:
                self.points.setdefault(point.name, []).append(point)

    def __getitem__(self, name: str) -> type[Policy]:
        if name in _OURS:
            return _OURS[name]
        points = self.points[name]
        if len(points) > 1:
            raise ValueError(f"{len(points)} plug-ins are named {name}: {', '.join(map(_told, points))}. Uninstall one")
        return _loaded(points[0])

    def __contains__(self, name: object) -> bool:  # a Mapping's own would import
        return name in _OURS or name in self.points

    def __iter__(self) -> Iterator[str]:
        return iter([*_OURS, *self.points])

    def __len__(self) -> int:
        return len(_OURS) + len(self.points)


def policies() -> Policies:
    """Every policy that is installed, by name, as of now."""
    return Policies()


def named(text: str) -> Policy:
    """The policy that `text` writes as Python does: `H2O(recent=64)`, `Protect(KeyDiff(), num_sinks=4)`, `TOVA`.

    Nothing is evaluated but names of policies and literals. Raises ValueError if it is no such expression, for unknown
    names and fields, with those that are near, and for values that the policy refuses.

    >>> named("Protect(H2O(recent=64), num_sinks=1)").policy.recent
    64
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a policy is written as H2O(recent=64), got {text!r}") from error
    if not isinstance(tree, (ast.Call, ast.Name)):
        raise ValueError(f"a policy is written as H2O(recent=64), got {text!r}")
    return _made(tree, policies())


def found(name: str) -> type[Policy] | None:
    """The policy class whose module and name are `name`, ours or a plug-in's; None if there is none.

    Plug-ins are imported whose entry point has that name. Raises ValueError if none is it and one cannot be imported.
    """
    known, wrong = policies(), None
    for kind in _OURS.values():
        if qualified(kind) == name:
            return kind
    for point in (each for points in (*known.points.values(), known.hidden) for each in points):
        if name.rpartition(".")[2] in (point.name, point.attr.rpartition(".")[2]):
            try:
                if qualified(kind := _loaded(point)) == name:
                    return kind
            except ValueError as error:
                wrong = error
    if wrong is not None:
        raise wrong
    return None


def listing(width: int = 80) -> tuple[str, list[str]]:
    """What a person reads of each policy, and what is wrong with plug-ins."""
    known, blocks, wrong = policies(), [], []
    for name in known:
        try:
            blocks.append(_described(name, known[name], known.points.get(name), width))
        except Exception as error:  # whatever a stranger's policy raises
            wrong.append(str(error) if isinstance(error, ValueError) else f"{name} cannot be described: {error!r}")
    wrong += [f"{_told(point)} is hidden by the policy of sinkcache that has its name" for point in known.hidden]
    return "\n".join(blocks), wrong


def _loaded(point: EntryPoint) -> type[Policy]:
    try:
        kind = point.load()
    except Exception as error:  # whatever a stranger's module raises
        raise ValueError(
            f"the plug-in {_told(point)} cannot be imported ({type(error).__name__}: {error}): mend it or uninstall it"
        ) from error
    if not isinstance(kind, type) or not issubclass(kind, Policy):
        raise ValueError(f"the plug-in {_told(point)} is no subclass of sinkcache.Policy: got {kind!r}")
    return kind


def _told(point: EntryPoint) -> str:
    origin = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
    return f"{point.name} = {point.value!r}{origin}"


def qualified(kind: type) -> str:
    """Its module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _made(tree: ast.Call | ast.Name, known: Policies) -> Policy:
    function = tree.func if isinstance(tree, ast.Call) else tree
    if not isinstance(function, ast.Name):
        raise ValueError(f"a policy's name must be a word such as H2O, got {ast.unparse(function)}")
    if function.id not in known:
        raise ValueError(f"no policy is named {function.id}{_nearest(function.id, list(known))}")
    kind = known[function.id]
    given = _arguments(tree, kind, known) if isinstance(tree, ast.Call) else {}
    if missing := [each.name for each in fields(kind) if each.init and _needed(each) and each.name not in given]:
        raise ValueError(f"{function.id} needs {' and '.join(missing)}: write {_signature(function.id, kind)}")
    try:
        return kind(**given)
    except TypeError as error:  # of a comparison with a value of another kind
        raise ValueError(f"{ast.unparse(tree)} cannot be made: {error}") from error


def _arguments(call: ast.Call, kind: type[Policy], known: Policies) -> dict[str, Any]:
    name, options = ast.unparse(call.func), [each for each in fields(kind) if each.init]
    by_place = [each.name for each in options if not each.kw_only]
    if len(call.args) > len(by_place):
        raise ValueError(f"{name} has {len(by_place)} fields, got {len(call.args)}: {_signature(name, kind)}")
    pairs: list[tuple[str | None, ast.expr]] = list(zip(by_place, call.args, strict=False))
    given: dict[str, Any] = {}
    for field, value in [*pairs, *((each.arg, each.value) for each in call.keywords)]:
        if field is None or isinstance(value, ast.Starred):
            raise ValueError(f"{name} takes its fields one by one, got {ast.unparse(call)}")
        if field not in [each.name for each in options]:
            near = _nearest(field, [each.name for each in options])
            raise ValueError(f"{name} has no field {field}{near or ': it has none'}")
        if field in given:
            raise ValueError(f"{name} got {field} twice: {ast.unparse(call)}")
        given[field] = _value(value, field, known)
    return given


def _value(tree: ast.expr, field: str, known: Policies) -> Any:
    if isinstance(tree, ast.Call) or (isinstance(tree, ast.Name) and tree.id in known):
        return _made(tree, known)
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError, MemoryError):
        words = f"{field}={ast.unparse(tree)}"
        raise ValueError(f"{words} is neither a literal nor a policy: a word is written in quotes") from None


def _nearest(name: str, names: list[str]) -> str:
    """How an error goes on: the names that are near, whatever their case, or all there are."""
    lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), lower, n=2)
    if near:
        return f": did you mean {' or '.join(lower[each] for each in near)}?"
    return f": there is {', '.join(names)}" if names else ""


def _needed(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _signature(name: str, kind: type[Policy]) -> str:
    options = []
    for each in (one for one in fields(kind) if one.init):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        options.append(each.name if _needed(each) else f"{each.name}={default!r}")
    return f"{name}({', '.join(options)})"


def _described(name: str, kind: type[Policy], points: list[EntryPoint] | None, width: int) -> str:
    about = (kind.__doc__ or "").strip().split("\n")[0]
    if about.startswith(f"{name}("):  # what @dataclass writes where there is nothing
        about = ""
    reads = "what its policies read" if any(_needed(each) for each in fields(kind)) else _reads(kind().watch())
    source = re.search(r"arXiv\s+(\d{4}\.\d{4,5})", sys.modules[kind.__module__].__doc__ or "")
    facts = [f"reads {reads}", *([f"arXiv {source[1]}"] if source else []), *([_told(points[0])] if points else [])]
    lines = textwrap.wrap(
        _signature(name, kind), width, subsequent_indent=" " * (len(name) + 1), break_long_words=False
    )
    for line in (about, "; ".join(facts)):
        lines += textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines) + "\n"


def _reads(watch: Watch) -> str:
    of_window = f"attention of {watch.window} quer{'y' if watch.window == 1 else 'ies'}"
    asked = {
        "attention of all queries" if watch.decay else "attention of the last query": watch.mass,
        of_window: watch.window,
        "keys": watch.keys,
        "values": watch.values,
        "queries": watch.queries,
    }
    return ", ".join(name for name, wanted in asked.items() if wanted) or "positions"
