"""Import names and what a wheel would install; who may import whom: ``test_layers.py``."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_sglang import __version__

ROOT = Path(__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"

FOLDERS = ("oscar_sglang", "triton_kernels", "calibration")


def run(code: str, cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_scripts_do_not_import_tests_and_nobody_edits_the_path():
    """``python -m`` and pytest's ``pythonpath`` put the checkout on it."""
    for folder in ("scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert folder == "tests" or "tests" not in imports(path), path
            edits = re.findall(r"^\s*sys\.path(?:\.|\[.*\] *=)", path.read_text(), re.MULTILINE)
            assert not edits, (path, edits)


def test_importing_the_package_is_free():
    code = "import sys, oscar_sglang; print({'torch', 'triton', 'sglang'} & set(sys.modules))"
    assert run(code).strip() == "set()"


def test_reference_and_calibration_need_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import oscar_sglang.kernels.reference, oscar_sglang.calibration.pipeline\n"
        "print('ok')"
    )
    assert run(code).strip() == "ok"


def test_one_place_knows_the_cache_directory():
    """Anything else that made one of its own would not move with $OSCAR_SGLANG_CACHE."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert ("XDG_CACHE_HOME" in text or "Path.home()" in text) == (path.name == "cache.py")


# Import name -> distribution, where they differ; and what transformers or SGLang bring with them.
DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "PIL": "pillow"}
BROUGHT = {"huggingface_hub", "packaging", "tokenizers", "flashinfer", "pynvml", "sgl_kernel"}


def declared() -> set[str]:
    """Distributions that pyproject.toml and the requirement files name."""
    project = (ROOT / "pyproject.toml").read_text()
    found = set(re.findall(r'"([A-Za-z0-9_.-]+)(?:[=>][^"]*)?"', project))
    for file in (ROOT / "scripts").glob("requirements-*.txt"):
        lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
        found |= {re.split(r"[=><\[]", line)[0] for line in lines if line}
    found |= set(re.findall(r"([\w-]+)==", (ROOT / "scripts" / "setup_env.sh").read_text()))
    return found


def test_everything_imported_is_installed_by_something():
    folders = ("scripts", "tests", *FOLDERS)
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    files = [p for p in files if "standins" not in p.parts]
    ours = {p.stem for p in files} | {p.parent.name for p in files}
    names = {name: p for p in files for name in imports(p)}
    foreign = {n for n in names if n not in ours | BROUGHT | sys.stdlib_module_names}
    assert {"matplotlib", "psutil", "hypothesis"} <= foreign
    missing = {n for n in foreign if DISTRIBUTIONS.get(n, n) not in declared()}
    assert not missing, {n: str(names[n]) for n in missing}


@pytest.mark.parametrize("script", ["plot_agents", "plot_itl", "plot_kernels", "plot_serving"])
def test_a_plot_without_matplotlib_says_what_to_install(script):
    code = (
        "import runpy, sys; sys.modules['matplotlib'] = None\n"
        f"runpy.run_module('scripts.{script}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip install '.[plots]'" in done.stderr
    assert re.search(r'^plots = \["matplotlib"', (ROOT / "pyproject.toml").read_text(), re.M)


@pytest.mark.parametrize("where", ["repository root", "elsewhere"])
def test_openais_triton_kernels_is_not_shadowed(tmp_path, where):
    """A package of that name on the path wins over our folder, even in the repository root."""
    openai = tmp_path / "site" / "triton_kernels"
    openai.mkdir(parents=True)
    (openai / "__init__.py").write_text("NAME = 'openai'\n")
    (openai / "matmul.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, ''); sys.path.append({str(openai.parent)!r})\n"
        "import triton_kernels, triton_kernels.matmul, oscar_sglang.kernels.layout as ours\n"
        "print(triton_kernels.NAME, ours.BLOCK)"
    )
    cwd = ROOT if where == "repository root" else tmp_path
    assert run(code, cwd).split() == ["openai", "16"]


def test_kernels_folder_has_no_init_and_the_links_are_links():
    assert not (ROOT / "triton_kernels" / "__init__.py").exists()
    for name, target in (("kernels", "triton_kernels"), ("calibration", "calibration")):
        link = ROOT / "oscar_sglang" / name
        assert link.is_symlink() and link.resolve() == ROOT / target


def test_plugin_entry_point_and_console_script():
    points = importlib.metadata.entry_points()
    (plugin,) = [p for p in points.select(group="sglang.srt.plugins") if p.name == "oscar"]
    assert plugin.value == "oscar_sglang.hooks:register"
    (script,) = [p for p in points.select(group="console_scripts") if p.name == "oscar-sglang"]
    assert script.value == "oscar_sglang.cli:main"


def test_wheel_holds_everything_and_no_top_level_triton_kernels(tmp_path):
    """Built from a copy, so that no build folder appears in the checkout."""
    copy = tmp_path / "src"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, copy], check=True)
    for name in ("pyproject.toml", "README.md"):
        if not (copy / name).exists():
            (copy / name).write_text((ROOT / name).read_text())
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--target", target, copy]
    subprocess.run(command, check=True)
    assert not (target / "triton_kernels").exists() and not (target / "calibration").exists()
    for module in (
        "kernels/reference.py",
        "kernels/attend.cu",
        "calibration/fit.py",
        "plugin/rank.py",
        "pool/memory_pool.py",
        "watch/dump.py",
        "artifact/file.py",
        "health/doctor.py",
        "calibration/report/style.css",
        "hooks.py",
    ):
        assert (target / "oscar_sglang" / module).is_file()
    assert (target / f"oscar_sglang-{__version__}.dist-info").is_dir()
    standin = target / "oscar_sglang" / "standins" / "kernel" / "sgl_kernel" / "__init__.py"
    assert standin.is_file()


def test_the_version_stands_in_one_place():
    """The package: pyproject.toml reads it (the wheel's name shows it, above), and no other file
    says another, but for the changelog, whose newest release it is."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and not re.search('^version = "', project, re.M)
    assert importlib.metadata.version("oscar-sglang") == __version__, "run scripts/setup_env.sh"
    releases = re.findall(r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$", CHANGELOG.read_text(), re.M)
    assert releases[0] == __version__


def test_a_commit_runs_the_checks_of_the_tests():
    """Those of pre-commit's that come from the environment are lines of scripts/test.sh."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    ours = re.findall(r"entry: (.+)\n +language: system", hooks)
    lines = (ROOT / "scripts" / "test.sh").read_text().splitlines()
    assert len(ours) >= 2 and set(ours) <= set(lines)
