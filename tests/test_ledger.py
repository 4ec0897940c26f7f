"""The patch surface held against another SGLang: what is gone or changed is named, row by row."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from oscar_sglang import hooks
from oscar_sglang.cli import doctor as command
from oscar_sglang.config import OscarError
from oscar_sglang.health import doctor
from oscar_sglang.plugin import ledger, registration
from oscar_sglang.plugin.ledger import Hook, Read, Sources, problems
from oscar_sglang.pool.sglang_types import Configurator, ForwardBatch, ModelConfig, ModelRunner

INSTALLED = Sources.installed()


def mutilate(folder: Path, changes: dict[str, tuple[str, str]]) -> Sources:
    """A copy of the installed SGLang (links) with one text replaced in each of some files."""
    for file, (old, new) in changes.items():
        here, there = folder / "sglang", INSTALLED._root / "sglang"
        here.mkdir(exist_ok=True)
        for part in Path(file).parts[1:]:
            for entry in there.iterdir():
                if entry.name != part and not (here / entry.name).exists():
                    (here / entry.name).symlink_to(entry)
            here, there = here / part, there / part
            if here.is_symlink():
                raise AssertionError("two changes share a folder that is already linked")
            if there.is_dir():
                here.mkdir(exist_ok=True)
        text = there.read_text()
        assert old in text, f"{file} has no {old!r}"
        here.write_text(text.replace(old, new))
    return Sources(folder)


def test_the_pinned_sglang_has_every_row():
    assert INSTALLED.version == hooks.SGLANG_VERSION
    assert registration.found_problems(INSTALLED) == []


def test_types_name_what_is_read_and_nothing_else():
    """A Protocol's attribute that is no row of READS would not be missed in another SGLang."""
    reads = {read.owner.rpartition(".")[2]: set(read.attributes) for read in hooks.READS}
    reads["Configurator"] = reads["KVCacheConfigurator"]
    for kind in (ModelConfig, Configurator, ModelRunner, ForwardBatch):
        methods = {name for name in vars(kind) if name.startswith("get_")}
        named = {*kind.__annotations__, *methods}
        assert named and named <= reads[kind.__name__], kind


@pytest.mark.parametrize(
    "file, old, new, words",
    [
        (
            "sglang/srt/mem_cache/allocation.py",
            "def get_last_loc(",
            "def find_last_loc(",
            "sglang.srt.mem_cache.allocation.get_last_loc is gone",
        ),
        (
            "sglang/srt/mem_cache/kv_cache_configurator.py",
            "def resolve_max_num_reqs(self, token_capacity: int)",
            "def resolve_max_num_reqs(self, capacity: int, ranks: int)",
            "resolve_max_num_reqs takes (self, capacity, ranks), expected (self, token_capacity)",
        ),
        (
            "sglang/srt/managers/schedule_batch.py",
            "    kv_committed_len: int",
            "    kv_committed_length: int",
            "schedule_batch.ReqKvInfo has no kv_committed_len (read by metrics, dump, lifecycle)",
        ),
        (
            "sglang/srt/arg_groups/fields/memory.py",
            "class Memory",
            "class Storage",
            None,  # fields stand in any class of the package: a new name of the class is no matter
        ),
        (
            "sglang/srt/runtime_context.py",
            "def get_parallel()",
            "def parallel()",
            "sglang.srt.runtime_context.get_parallel is gone (imported by",
        ),
    ],
)
def test_a_mutilated_copy_is_named(tmp_path, file, old, new, words):
    found = registration.found_problems(mutilate(tmp_path, {file: (old, new)}))
    assert (not found) if words is None else any(words in line for line in found), found


def test_members_are_found_wherever_they_are_set(tmp_path):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.0'\n")
    (package / "base.py").write_text(
        "class Base:\n    kept: int = 0\n\n    def __init__(self):\n        self.made = 1\n"
    )
    (package / "child.py").write_text(
        "from sglang.base import Base as Root\n\n\nclass Child(Root):\n    @property\n"
        "    def shown(self): ...\n\n    @classmethod\n    def make(cls, a, *, b=1, **rest): ...\n"
    )
    found = Sources(tmp_path)
    assert {"kept", "made", "shown", "make"} <= found.members("sglang.child.Child")
    assert found.members("sglang.child.Gone") is None
    make = ("sglang.child.Child.make", "AROUND", "rank.cell_size")
    fits = Hook(*make, ("a", "..."), why="", until="")
    short = Hook(*make, ("a",), why="", until="")
    lost = Read("sglang.child.Child", ("shown", "hidden"), by="nobody")
    assert ledger.hook_problem(fits, found) is None
    assert ledger.hook_problem(short, found) == "Child.make takes (a, b, rest), expected (a)"
    assert ledger.read_problem(lost, found) == "sglang.child.Child has no hidden (read by nobody)"
    assert len(problems((), (), found)) == len(ledger.imports())


def test_a_wheel_reads_like_a_folder(tmp_path):
    wheel = tmp_path / "sglang-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("sglang/__init__.py", "")
        z.writestr("sglang/_version.py", "__version__ = version = '1.0'\n")
        z.writestr("sglang/srt/models/utils.py", "def enable_fused_set_kv_buffer(forward_batch): 1")
    found = Sources(wheel)
    hook = next(h for h in hooks.HOOKS if h.name == "enable_fused_set_kv_buffer")
    assert found.version == "1.0" and ledger.hook_problem(hook, found) is None
    assert ledger.changes([hook], INSTALLED, found) == ["enable_fused_set_kv_buffer"]


def test_the_command_prints_rows_and_fails(tmp_path, capsys):
    changed = mutilate(
        tmp_path,
        {"sglang/srt/models/utils.py": ("def enable_fused_set_kv_buffer(", "def fused_store(")},
    )
    console = Console(width=200, soft_wrap=True)
    checks = list(doctor.port(changed._root))
    assert command.report(checks, console, "fine") == 1
    printed = capsys.readouterr().out
    assert "sglang.srt.models.utils.enable_fused_set_kv_buffer is gone" in printed
    assert f"1 of {len(checks)} checks failed" in printed
    bodies = next(c for c in checks if c.name == "bodies")
    assert bodies.status == doctor.OK  # nothing else differs
    assert [c.status for c in doctor.port(tmp_path / "nowhere")] == [doctor.FAIL]


@pytest.fixture
def version(monkeypatch):
    import sglang

    def pretend(text: str) -> str | None:
        monkeypatch.setattr(sglang, "__version__", text)
        registration.unfit.cache_clear()
        return registration.unfit()

    yield pretend
    registration.unfit.cache_clear()


def test_a_newer_sglang_serves_if_the_ledger_holds(version, monkeypatch, caplog):
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: registered.append(target))
    assert version("0.5.99") is None
    registration.register()
    assert len(registered) == len(hooks.HOOKS)
    assert "tested with sglang 0.5.23; 0.5.99" in caplog.text


def test_a_newer_sglang_that_changed_is_refused_by_row(version, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(registration, "found_problems", lambda _sources: ["get_last_loc is gone"])
    reason = version("0.5.99")
    assert "0.5.99 has changed what it relies on: get_last_loc is gone" in reason
    with pytest.raises(OscarError, match="get_last_loc is gone.*pip install sglang==0.5.23"):
        registration.verify()
    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: registered.append(target))
    registration.register()
    assert registered == [h.target for h in hooks.HOOKS if ".ServerArgs." in h.target]


@pytest.mark.parametrize("text", ["0.5.17", "0.5.23.dev3", "0.4.9"])
def test_an_older_sglang_is_refused(version, text):
    assert f"found the older {text}; pip install sglang==0.5.23" in version(text)
