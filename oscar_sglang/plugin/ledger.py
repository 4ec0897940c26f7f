"""Rows of the patch surface, and how they are held against an SGLang without importing it.

The comparison reads source text only (``ast``), so that a wheel, a checkout or the installed
package of any version can be examined, also where its dependencies are missing.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def named(function: str) -> Callable[..., Any]:
    """Our function "module.name" in this room: its module is loaded by the first call."""
    module, name = function.split(".")

    def call(*args: Any, **kwargs: Any) -> Any:
        loaded = importlib.import_module(f".{module}", _PACKAGE)
        return getattr(loaded, name)(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Hook:
    """One patched function.

    target    dotted path in SGLang
    kind      name of SGLang's HookType
    function  ours, see ``named``
    takes     parameters the target must have, in this order; a last "...": more may follow
    why       what would be wrong without it
    until     when it can go
    """

    target: str
    kind: str
    function: str
    takes: tuple[str, ...]
    why: str
    until: str
    call: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "call", named(self.function))

    @property
    def name(self) -> str:
        """``Class.method`` or ``function``."""
        *_, owner, name = self.target.split(".")
        return f"{owner}.{name}" if owner[0].isupper() else name


@dataclass(frozen=True)
class Read:
    """Attributes of one of SGLang's classes that our code reads or overrides.

    ``owner`` "PACKAGE.*" means any class of the package's modules.
    """

    owner: str
    attributes: tuple[str, ...]
    by: str


class Sources:
    """Source text of one SGLang: a folder that is or holds ``sglang``, or a wheel."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if ``path`` holds no SGLang."""
        self._zip = zipfile.ZipFile(path) if path.suffix == ".whl" else None
        self._root = path.parent if path.name == "sglang" else path
        self._trees: dict[str, ast.Module | None] = {}
        if self.text("sglang/__init__.py") is None:
            raise ValueError(
                f"{path} is no SGLang: neither a wheel nor a folder with sglang/ in it"
            )

    @classmethod
    def installed(cls) -> Sources:
        """Raises ValueError where no SGLang is installed."""
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:
            raise ValueError("no SGLang is installed")
        return cls(Path(spec.origin).parent)

    def text(self, file: str) -> str | None:
        try:
            if self._zip:
                return self._zip.read(file).decode()
            return (self._root / file).read_text()
        except (KeyError, OSError):
            return None

    def files(self, folder: str) -> list[str]:
        """Python files in ``folder`` and below."""
        if self._zip:
            names = self._zip.namelist()
        else:
            names = [str(p.relative_to(self._root)) for p in (self._root / folder).rglob("*.py")]
        return sorted(n for n in names if n.startswith(folder + "/") and n.endswith(".py"))

    @cached_property
    def version(self) -> str:
        """From the package's own version file; "unknown" without one."""
        for file in ("sglang/_version.py", "sglang/version.py"):
            found = re.search(r"version\w* = (?:version = )?['\"]([^'\"]+)", self.text(file) or "")
            if found:
                return found[1]
        return "unknown"

    def module(self, name: str) -> ast.Module | None:
        """The syntax tree of a module, None if there is none of that name."""
        if name not in self._trees:
            base = name.replace(".", "/")
            text = self.text(base + ".py") or self.text(base + "/__init__.py")
            self._trees[name] = None if text is None else ast.parse(text)
        return self._trees[name]

    def split(self, target: str) -> tuple[str | None, list[str]]:
        """The longest prefix of a dotted path that is a module, and the rest."""
        parts = target.split(".")
        for cut in range(len(parts), 0, -1):
            if self.module(name := ".".join(parts[:cut])) is not None:
                return name, parts[cut:]
        return None, parts

    def find(self, target: str) -> ast.AST | None:
        """The class, function or assignment that a dotted path names, None if it is gone."""
        module, rest = self.split(target)
        node: ast.AST | None = self.module(module) if module else None
        for name in rest:
            node = next((n for n in _statements(node) if name in _names(n)), None)
        return node

    def members(self, owner: str) -> set[str] | None:
        """Names an object of the class has: defined, annotated or assigned to ``self``, here or in
        a base class. None if the class is gone."""
        if owner.endswith(".*"):
            folder = owner[:-2].replace(".", "/")
            modules = [ast.parse(self.text(f) or "") for f in self.files(folder)]
            classes = [n for m in modules for n in ast.walk(m) if isinstance(n, ast.ClassDef)]
            return set().union(*map(_own_members, classes)) if classes else None
        node = self.find(owner)
        if not isinstance(node, ast.ClassDef):
            return None
        found = _own_members(node)
        module = self.split(owner)[0]
        for base in node.bases:
            if isinstance(base, ast.Name):
                found |= self.members(self._origin(module, base.id)) or set()
        return found

    def _origin(self, module: str | None, name: str) -> str:
        """Where a name used in a module is defined, following one ``from ... import``."""
        tree = self.module(module) if module else None
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"{node.module}.{alias.name}"
        return f"{module}.{name}"


def _statements(node: ast.AST | None) -> Iterator[ast.AST]:
    """Statements of a module or class, those under ``if`` and ``try`` included."""
    for child in getattr(node, "body", ()):
        yield child
        if isinstance(child, ast.If | ast.Try):
            yield from _statements(child)
            yield from child.orelse
            for handler in getattr(child, "handlers", ()):
                yield from handler.body


def _names(node: ast.AST) -> set[str]:
    """Names that a statement binds."""
    if isinstance(node, ast.ClassDef | _Function):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(a.asname or a.name).split(".")[0] for a in node.names}
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}


def _own_members(node: ast.ClassDef) -> set[str]:
    found = set().union(*map(_names, _statements(node))) if node.body else set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                found.add(inner.attr)
    return found


def parameters(function: _Function) -> tuple[str, ...]:
    """Names in order, without a class method's ``cls``."""
    a = function.args
    names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    names += [p.arg for p in (a.vararg, a.kwarg) if p]
    decorators = {d.id for d in function.decorator_list if isinstance(d, ast.Name)}
    return tuple(names[1:] if "classmethod" in decorators else names)


def hook_problem(hook: Hook, sources: Sources) -> str | None:
    """What of a hook's target is not as expected."""
    node = sources.find(hook.target)
    if not isinstance(node, _Function):
        return f"{hook.target} is gone"
    found, wanted = parameters(node), hook.takes
    more = wanted[-1:] == ("...",)
    cut = wanted[:-1] if more else wanted
    if found[: len(cut)] != cut or (not more and len(found) != len(cut)):
        return f"{hook.name} takes ({', '.join(found)}), expected ({', '.join(wanted)})"
    return None


def read_problem(read: Read, sources: Sources) -> str | None:
    """Which attributes of a class are gone."""
    members = sources.members(read.owner)
    if members is None:
        return f"{read.owner} is gone (read by {read.by})"
    gone = sorted(set(read.attributes) - members)
    return f"{read.owner} has no {', '.join(gone)} (read by {read.by})" if gone else None


def imports() -> dict[str, set[str]]:
    """SGLang's names that this package imports -> our modules that do."""
    found: dict[str, set[str]] = {}
    walk = os.walk(Path(__file__).parents[1], followlinks=True)
    files = (Path(folder, name) for folder, _, names in walk for name in names)
    for file in sorted(f for f in files if f.suffix == ".py" and "standins" not in f.parts):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                for alias in node.names:
                    found.setdefault(f"{node.module}.{alias.name}", set()).add(file.stem)
    return found


def problems(hooks: Iterable[Hook], reads: Iterable[Read], sources: Sources) -> list[str]:
    """Everything that ``sources`` does not have as we need it, a sentence each."""
    found = [hook_problem(h, sources) for h in hooks] + [read_problem(r, sources) for r in reads]
    for name, users in imports().items():
        if sources.find(name) is None:
            found.append(f"{name} is gone (imported by {', '.join(sorted(users))})")
    return [f for f in found if f]


def changes(hooks: Iterable[Hook], old: Sources, new: Sources) -> list[str]:
    """Hook targets whose body differs: they fit by name, and want a reader."""
    found = []
    for hook in hooks:
        one, other = old.find(hook.target), new.find(hook.target)
        if one and other and ast.dump(one) != ast.dump(other):
            found.append(hook.name)
    return found


def same_release(found: str, wanted: str) -> int:
    """-1, 0 or 1: ``found`` is older than, equal to or newer than ``wanted``."""
    from packaging.version import Version

    a, b = Version(found), Version(wanted)
    return (a > b) - (a < b)
