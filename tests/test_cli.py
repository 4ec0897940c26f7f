"""The command line: what it writes, prints and refuses, and what it does not import."""

import argparse
import re
import shlex
import subprocess
import sys

import pytest

from oscar_sglang import __version__
from oscar_sglang.artifact import file as art
from oscar_sglang.cli import CODEC_NAMES, _parser, codecs, main
from oscar_sglang.config import DEFAULT_CODEC
from oscar_sglang.kernels.codec import CODECS
from scripts.lib.tiny_models import edit_config, llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("model"))


def fails(capsys, argv: list[str]) -> str:
    capsys.readouterr()
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("oscar-sglang: error: ") and error.count("\n") == 1
    return error


def test_codec_names_are_the_codecs():
    assert set(CODEC_NAMES) == set(CODECS)


def test_calibrate_then_inspect(model_dir, tmp_path, capsys):
    out = tmp_path / "new" / "a.safetensors"
    assert main(["calibrate", "--model", str(model_dir), "--out", str(out), "--tokens", "600"]) == 0
    printed = capsys.readouterr().out
    artifact = art.load(out)
    assert f"id {artifact.id}" in printed and "peak memory" in printed and "GiB" in printed
    assert "warning: only 600 tokens" in printed

    assert main(["inspect", str(out)]) == 0
    printed = capsys.readouterr().out
    for part in (artifact.id, "LlamaForCausalLM", "sampled from the model, seed 0", "K basis"):
        assert part in printed


def test_options_reach_the_artifact(model_dir, tmp_path):
    out = tmp_path / "a.safetensors"
    argv = ["calibrate", "--model", str(model_dir), "--out", str(out)]
    assert main([*argv, "--codec", "oscar", "--tokens", "700", "--seed", "5"]) == 0
    artifact = art.load(out)
    assert artifact.codec == "oscar"
    assert artifact.provenance["tokens"] == 700
    assert artifact.provenance["data"] == "sampled from the model, seed 5"


@pytest.mark.parametrize("codec", ["accurate-compact", "lloyd", "omni"])
def test_other_codecs_calibrate_inspect_and_verify(model_dir, tmp_path, capsys, codec):
    out = tmp_path / "a.safetensors"
    argv = ["--model", str(model_dir), "--tokens", "1200"]
    assert main(["calibrate", *argv, "--out", str(out), "--codec", codec]) == 0
    artifact = art.load(out)
    assert artifact.codec == codec
    assert {n.split(".")[2] for n in artifact.tensors()} == set(CODECS[codec].tensors(64))
    assert ("k_sigmas" in artifact.options) == (CODECS[codec].meta.name == "compact")
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    assert codec in capsys.readouterr().out
    assert main(["verify", str(out), *argv]) == 0
    assert "fits this model" in capsys.readouterr().out


def test_inspect_uncalibrated(model_dir, tmp_path, capsys):
    out = tmp_path / "a.safetensors"
    art.data_free(art.Fingerprint.of(model_dir)).save(out)
    assert main(["inspect", str(out)]) == 0
    assert "warning: uncalibrated" in capsys.readouterr().out


def test_errors_are_one_line(model_dir, tmp_path, capsys):
    missing, text_file = tmp_path / "missing", model_dir / "a.txt"
    text_file.write_text("text")
    assert "no such file" in fails(capsys, ["inspect", str(missing)])
    calibrate = ["calibrate", "--out", str(tmp_path / "a.safetensors"), "--model"]
    error = fails(capsys, [*calibrate, str(missing)])
    assert "missing: no such folder; give a folder" in error and "Qwen/Qwen3-8B" in error
    assert "a.txt: is a file" in fails(capsys, [*calibrate, str(text_file)])
    revision = [*calibrate, str(model_dir), "--revision", "v2"]
    assert "is a folder; drop --revision" in fails(capsys, revision)
    text = ["--data", str(tmp_path / "missing.txt")]
    assert "missing.txt: cannot be read" in fails(capsys, [*calibrate, str(model_dir), *text])
    assert "give more tokens" in fails(capsys, [*calibrate, str(model_dir), "--tokens", "9"])
    to_directory = ["calibrate", "--model", str(model_dir), "--out", str(tmp_path)]
    assert "is a directory" in fails(capsys, to_directory)
    assert not list(tmp_path.iterdir())


def test_unsupported_model(tmp_path, capsys):
    folder = llama(tmp_path)
    edit_config(folder, sliding_window=128)
    argv = ["calibrate", "--model", str(folder), "--out", str(tmp_path / "a.safetensors")]
    assert "sliding-window" in fails(capsys, argv)


@pytest.mark.parametrize("argv", [[], ["nope"], ["calibrate"], ["inspect"]])
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as status:
        main(argv)
    assert status.value.code == 2
    assert "usage: oscar-sglang" in capsys.readouterr().err


def parsers() -> dict[str, argparse.ArgumentParser]:
    (found,) = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return found.choices


@pytest.mark.parametrize("name", parsers())
def test_help_says_what_how_and_by_default(name):
    """A sentence, examples that parse, and for each option what it is and its default."""
    parser = parsers()[name]
    assert re.match(r"[A-Z].*\.", parser.description, re.DOTALL)
    examples = parser.epilog.splitlines()[1:]
    assert examples
    for example in examples:
        program, *argv = shlex.split(example)
        assert program == "oscar-sglang" and argv[0] == name
        _parser().parse_args(argv)
    for action in parser._actions:
        assert action.help, action.option_strings
        if action.default in (None, False, [], argparse.SUPPRESS):
            continue
        shown = action.default[0] if isinstance(action.default, tuple) else action.default
        assert f"(default: {shown})" in action.help % vars(action), action.option_strings


def test_codecs_lists_what_is_served(capsys):
    assert main(["codecs"]) == 0
    printed = capsys.readouterr().out
    rows = list(codecs.rows())
    assert [row.name for row in rows] == list(CODEC_NAMES)
    assert printed.count("(default)") == 1 and f"{DEFAULT_CODEC} (default)" in printed
    for row in rows:
        (line,) = [x for x in printed.splitlines() if x.startswith(f" {row.name} ")]
        assert f"{row.bits:.3f}" in line and row.what and row.when and row.published
    bits = {row.name: row.bits for row in rows}
    assert bits["feedback"] == 2 + 2 * 16 / 128 and bits["compact"] == 2 + 2 * 8 / 128


def test_version(capsys):
    with pytest.raises(SystemExit) as status:
        main(["--version"])
    assert status.value.code == 0
    assert capsys.readouterr().out == f"oscar-sglang {__version__}\n"


def test_our_bugs_are_not_hidden(monkeypatch):
    def broken(path):
        raise ValueError("a bug")

    monkeypatch.setattr(art, "load", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["inspect", "file"])


def test_start_up_imports_nothing_heavy():
    code = (
        "import sys, oscar_sglang.cli as c, oscar_sglang.calibration; c._parser();"
        "print(sorted({'torch', 'transformers', 'sglang', 'triton'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_inspect_does_not_import_transformers(model_dir, tmp_path):
    out = tmp_path / "a.safetensors"
    art.data_free(art.Fingerprint.of(model_dir)).save(out)
    code = (
        f"import sys; from oscar_sglang.cli import main; status = main(['inspect', {str(out)!r}]);"
        "print(status, 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("0 False\n")
