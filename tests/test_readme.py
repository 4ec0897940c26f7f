"""Every command and flag that a page shows exists, with the arguments it shows; every variable,
flag, metric and script stands on one."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlparse

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from oscar_sglang.cli import _parser
from oscar_sglang.config import option_names
from oscar_sglang.health import doctor
from oscar_sglang.plugin.metrics import COUNTERS, GAUGES

if sys.version_info >= (3, 11):
    import tomllib
else:  # packaging's tests need it, too
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "*README.md", "README.md"], cwd=ROOT, capture_output=True, text=True
).stdout.split()
READMES = sorted({ROOT / name for name in LISTED})
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
OPERATOR = ROOT / "oscar_sglang" / "README.md"
SHELLS = ("bash", "sh", "shell", "console")
# Runs a module up to its argument parser; prints the options it has.
UP_TO_ITS_PARSER = """
import argparse, json, runpy, sys
strict, module, *argv = sys.argv[1:]
parse = argparse.ArgumentParser.parse_args
def stop(self, args=None, namespace=None):
    if strict == "strict":
        parse(self, args, namespace)
    print("OPTIONS", json.dumps(sorted(self._option_string_actions)))
    raise SystemExit(0)
argparse.ArgumentParser.parse_args = stop
sys.argv = [module, *argv]
runpy.run_module(module, run_name="__main__")
"""


def blocks(path: Path) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a Markdown file."""
    return re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """(file, command) of every line of every shell block, continued lines joined."""
    found = []
    for path in (*READMES, *PAGES):
        for language, text in blocks(path):
            if language in SHELLS:
                lines = text.replace("\\\n", " ").splitlines()
                found += [(path.name, line) for line in lines if shlex.split(line, comments=True)]
    return found


def spans() -> list[tuple[str, str]]:
    """(file, code) of every piece of inline code that shows a flag."""
    found = []
    for path in READMES:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        code = [" ".join(c.split()) for c in re.findall(r"`([^`]+)`", prose)]
        found += [(path.name, c) for c in code if re.search(r"(^| )--[a-z]", c)]
    return found


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def server_parser() -> argparse.ArgumentParser:
    """SGLang's own, with the plugin's flags."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def check_pip(words: list[str]) -> None:
    assert words[0] == "install", words
    for word in (w for w in words[1:] if not w.startswith("-")):
        if word.startswith((".", "/")):
            path, _, extras = word.rstrip("]").partition("[")
            assert (ROOT / path / "pyproject.toml").is_file(), word
            unknown = set(filter(None, extras.split(","))) - set(project()["optional-dependencies"])
            assert not unknown, f"{word}: no extra {unknown}"
            continue
        requirement = Requirement(word)
        assert not requirement.url or urlparse(requirement.url).scheme, f"{word}: not a URL"
        published = requirement.name.replace("_", "-") != project()["name"]
        assert published or requirement.url, f"{word}: this package is on no index"


@cache
def options_of_script(strict: bool, module: str, *argv: str) -> set[str]:
    """Options of a script's parser, which takes ``argv`` if ``strict``."""
    command = [sys.executable, "-c", UP_TO_ITS_PARSER, "strict" if strict else "", module, *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("OPTIONS ")]
    assert lines, f"{module} {' '.join(argv)}: {done.stderr[-500:]}"
    return set(json.loads(lines[0].removeprefix("OPTIONS ")))


def check_module(module: str, argv: list[str]) -> None:
    path = ROOT / module.replace(".", "/")
    assert path.with_suffix(".py").is_file(), module
    if argv:
        options_of_script(True, module, *argv)


def check_shell(script: str, argv: list[str]) -> None:
    """That it exists, can be run, and hands ``argv`` to a program that takes them."""
    path = ROOT / script
    assert path.is_file(), script
    assert path.stat().st_mode & 0o100, f"{script} cannot be run"
    ((module, own),) = re.findall(
        r'^exec python -m (\S+)(.*) "\$@"$', path.read_text(), re.MULTILINE
    )
    if argv and module != "pytest":
        check_module(module, [*shlex.split(own), *argv])


def check(command: str) -> None:
    """Raises AssertionError, InvalidRequirement or SystemExit if a command would not be taken."""
    words = shlex.split(command, comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    match words:
        case ["pip" | "pip3", *rest] | ["python", "-m", "pip", *rest]:
            check_pip(rest)
        case ["sglang", "serve", *rest] | [
            "python",
            "-m",
            "sglang.launch_server" | "oscar_sglang.launch_server",
            *rest,
        ]:
            server_parser().parse_args(rest)
        case ["oscar-sglang", *rest] | ["python", "-m", "oscar_sglang.cli", *rest]:
            _parser().parse_args(rest)
        case ["python", "-m", module, *rest] if module.startswith(("scripts.", "tests.")):
            check_module(module, rest)
        case [script, *rest] if script.startswith("./scripts/"):
            check_shell(script, rest)
        case ["curl", url, *rest]:
            assert urlparse(url).path.startswith(("/v1/", "/generate", "/server_info", "/metrics"))
            if "-d" in rest:
                assert json.loads(rest[rest.index("-d") + 1])
        case ["git" | "cd", *_]:
            pass
        case _:
            raise AssertionError(f"{command}: no rule says how to check this")


def test_there_is_something_to_check():
    assert ROOT / "README.md" in READMES and len(commands()) >= 5 and len(spans()) >= 10
    for path in READMES:
        assert path.read_text().count("```") % 2 == 0
    text = "\n".join(command for _, command in commands())
    for wanted in ("pip install", "launch_server", "oscar-sglang eval", "./scripts/demo.sh"):
        assert wanted in text


def test_the_front_page_is_one_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 90 and max(map(len, lines)) <= 130


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert urlparse(link).scheme or (page.parent / link).exists(), link


def tracked(*patterns: str) -> list[Path]:
    listed = ["git", "ls-files", *patterns]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split()]


def test_every_environment_variable_is_explained():
    """In one table, and none that nothing reads."""
    files = [p for p in tracked("*.py", "*.sh", ".ci/run") if p.is_file()]
    used = {v for p in files for v in re.findall(r"\bOSCAR_[A-Z_]*[A-Z]\b", p.read_text())}
    listed = re.findall(r"^\| `(OSCAR_\w+)` \|", OPERATOR.read_text(), re.MULTILINE)
    assert len(listed) >= 10 and set(listed) == used and len(listed) == len(used)


def test_every_flag_and_metric_is_explained():
    text = OPERATOR.read_text()
    flags = re.findall(r"^\| (`--oscar.*?) \|", text, re.MULTILINE)
    shown = {flag for cell in flags for flag in re.findall(r"`(--\S+)`", cell)}
    assert shown == {"--" + name.replace("_", "-") for name in option_names()}
    metrics = {f"oscar:{name}" for name in GAUGES} | {f"oscar:{n}_total" for n in COUNTERS}
    cells = re.findall(r"^\| (`oscar:.*?) \|", text, re.MULTILINE)
    shown = {name for cell in cells for name in re.findall(r"`(oscar:\w+)", cell)}
    assert shown == metrics | {"oscar:segment_bytes"}


def test_every_script_is_explained():
    programs = (ROOT / "scripts" / "README.md").read_text().partition("## Programs")[2]
    rows = re.findall(r"^\| (`\w+`.*?) \|", programs.partition("\n## ")[0], re.M)
    shown = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}
    assert shown == {p.stem for p in tracked("scripts/*.py") if p.parent.name == "scripts"} - {
        "__init__"
    }


@pytest.mark.parametrize("where, command", commands(), ids=lambda x: x[:40])
def test_command(where, command):
    check(command)


@cache
def known_flags() -> set[str]:
    """Options of a server and of every command of ours."""
    found = set(server_parser()._option_string_actions)
    parsers = [_parser()]
    for parser in parsers:
        found |= set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


@pytest.mark.parametrize("where, code", spans(), ids=lambda x: x[:40])
def test_flags_in_prose(where, code):
    """Flags of a script are those of its own parser."""
    flags = set(re.findall(r"(?:^| |\|)(--[a-z][a-z0-9-]*)", code))
    known = set()
    if script := re.search(r"(\w+)\.(py|sh)\b", code):
        (path,) = [p for p in (ROOT / "scripts").glob(script[0])] or [None]
        assert path, f"{code}: no such script"
        if path.suffix == ".sh":
            return check(code if code.startswith("./") else "./" + code)
        known = options_of_script(False, f"scripts.{path.stem}")
    else:
        known = known_flags()
    assert flags and flags <= known, f"{code}: unknown {sorted(flags - known)}"


@pytest.mark.parametrize(
    "command",
    [
        "pip install 'oscar-sglang[sglang] @ .'",
        "pip install oscar-sglang[sglang]",
        "pip install '.[nothing]'",
        "pip install './absent'",
        "python -m sglang.launch_server --model-path M --kv-cache-dtype int3",
        "sglang serve --model-path M --oscar-codek feedback",
        "oscar-sglang calibrate --model M",
        "oscar-sglang inspekt FILE",
        "python -m scripts.absent",
        "python -m scripts.check_gpu --modell DIR",
        "python scripts/check_gpu.py --list",
        "./scripts/demo.sh --surve",
        "curl http://127.0.0.1:1/v1/chat/completions -d '{model}'",
        "frobnicate now",
    ],
)
def test_the_rules_refuse_what_does_not_work(command, capsys):
    with pytest.raises((AssertionError, InvalidRequirement, SystemExit, json.JSONDecodeError)):
        check(command)


def test_what_the_doctor_advises_can_be_installed(monkeypatch):
    """Its hints, with nothing installed."""
    monkeypatch.setattr(doctor, "_version", lambda _name: None)
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(doctor, "device", lambda: iter(()))
    hints = [c.detail for c in doctor.examine() if "pip install" in c.detail]
    assert len(hints) >= 4
    for hint in hints:
        found = re.search(r"pip install (\S+?\]?'?)(?=[;,.]? |$)", hint)
        check_pip(["install", *shlex.split(found[1])])


def test_pip_takes_the_install_command(tmp_path):
    """As the README has it, in a clone; nothing is fetched or installed."""
    (install,) = {c for _, c in commands() if "pip install" in c and "." in c}
    copy = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, copy], check=True)
    words = shlex.split(install, comments=True)
    assert words[:2] == ["pip", "install"]
    quiet = ["--dry-run", "--no-index", "--no-deps", "--no-build-isolation", "-q"]
    command = [sys.executable, "-m", "pip", "install", *quiet, *words[2:]]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
