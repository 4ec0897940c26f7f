"""Who imports whom: every import of the package, relative, lazy or for types alone, against the
table of rooms; and no module imports, by whatever way, one that imports it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from oscar_sglang import hooks

ROOT = Path(__file__).parents[1]
FOLDERS = {"oscar_sglang": (), "calibration": ("calibration",), "triton_kernels": ("kernels",)}

# Room (or module with a rule of its own) -> what it may import besides itself. A room that is not
# here may not be. "" is the package's version.
GROUND = {"", "cache", "config", "events"}
ROOMS = {
    "": set(),
    "cache": set(),
    "config": {"kernels"},  # names of codecs, looked up when they are asked for
    "events": set(),
    "launch_server": set(),
    "kernels": {"cache"},
    "artifact": {"cache", "kernels"},
    "calibration": {"", "cache", "config", "kernels", "artifact", "launch_server"},
    "pool": {"config", "kernels", "artifact"},
    "watch": {"config", "events", "kernels", "pool"},
    "plugin.ledger": set(),
    "hooks": {"plugin.ledger"},
    "health.selftest": {"config", "kernels"},
    "plugin": {
        *GROUND, "kernels", "artifact", "calibration", "pool", "watch", "hooks", "plugin.ledger",
        "health.selftest",
    },
    "health": {
        *GROUND, "kernels", "artifact", "calibration", "plugin", "plugin.ledger", "hooks",
        "health.selftest",
    },
    "cli": {*GROUND, "kernels", "artifact", "calibration", "plugin", "health", "launch_server"},
}  # fmt: skip
# Modules that import SGLang whenever they are imported, and those that do so when they are asked.
SGLANG_ALWAYS = {"pool.cpu_backend", "pool.gpu_backend", "pool.memory_pool"}
SGLANG_LAZILY = ("plugin.", "pool.", "health.", "launch_server", "calibration.sglang_")
# Room -> what of others it may not import at all.
FOREIGN = {
    "kernels": {"sglang", "transformers", "safetensors"},
    "calibration": {"triton"},
    "artifact": {"transformers", "triton"},
}


class Import(NamedTuple):
    """``name``: a module of ours, dotted from the package on, or somebody else's package."""

    ours: bool
    name: str
    lazy: bool


def _files() -> Iterator[tuple[str, Path]]:
    for folder, prefix in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            linked = folder == "oscar_sglang" and parts[0] in ("calibration", "kernels")
            if not linked and "standins" not in parts:
                yield ".".join((*prefix, *parts)).removesuffix("__init__").rstrip("."), path


MODULES = dict(_files())


def imports(module: str) -> set[Import]:
    path = MODULES[module]
    tree = ast.parse(path.read_text())
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = [part for part in package if part]
    found = set()
    for node in ast.walk(tree):
        lazy = node not in tree.body
        if isinstance(node, ast.Import):
            found |= {Import(False, a.name.split(".")[0], lazy) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = node.module.split(".") if node.module else []
            if node.level:
                base = package[: len(package) + 1 - node.level] + names
            elif names[0] == "oscar_sglang":
                base = names[1:]
            else:
                found.add(Import(False, names[0], lazy))
                continue
            for alias in node.names:
                whole = ".".join((*base, alias.name))
                found.add(Import(True, whole if whole in MODULES else ".".join(base), lazy))
    return found - {Import(True, module, lazy) for lazy in (False, True)}


IMPORTS = {module: imports(module) for module in MODULES}


def room(module: str) -> str:
    """The longest name of ROOMS that the module is, or is in."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOMS), f"{module} has no room")


def test_the_reader_sees_every_kind_of_import():
    assert Import(True, "plugin.registration", True) in IMPORTS["plugin.arguments"]
    assert Import(True, "artifact.fingerprint", False) in IMPORTS["calibration.data"]
    assert Import(True, "calibration.sglang_engine", True) in IMPORTS["calibration.engines"]
    assert Import(True, "", False) in IMPORTS["calibration.pipeline"]
    assert Import(False, "sglang", True) in IMPORTS["launch_server"]
    assert len(MODULES) > 120 and all(name in MODULES for name in SGLANG_ALWAYS)


def test_a_module_imports_only_what_its_room_may():
    wrong = []
    for module, found in IMPORTS.items():
        mine = room(module)
        foreign = FOREIGN.get(mine, set()) | {"oscar_sglang", "triton_kernels"}
        wrong += [
            f"{module} imports {i.name}"
            for i in found
            if (room(i.name) not in {mine, *ROOMS[mine]} if i.ours else i.name in foreign)
        ]
    assert not wrong


def test_who_imports_sglang():
    found = [(m, i.lazy) for m, f in IMPORTS.items() for i in f if i[:2] == (False, "sglang")]
    assert {module for module, lazy in found if not lazy} == SGLANG_ALWAYS
    assert not [module for module, _ in found if not module.startswith(SGLANG_LAZILY)]


def test_rooms_have_floors():
    """Nor do rooms import one another in a circle: what the table allows is an order."""
    list(TopologicalSorter(ROOMS).static_order())


def test_no_circle_of_imports():
    graph = {m: {i.name for i in found if i.ours} for m, found in IMPORTS.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_hooks_name_functions_that_are_there():
    """By name, as nothing of ours is loaded before SGLang calls it."""
    for function in ("registration.register", *(hook.function for hook in hooks.HOOKS)):
        module, name = function.split(".")
        tree = ast.parse(MODULES[f"plugin.{module}"].read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, function
