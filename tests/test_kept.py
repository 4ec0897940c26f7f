"""Artifacts that a server makes for itself: one file however often it starts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from oscar_sglang.artifact import file as art
from oscar_sglang.artifact import kept
from tests.test_artifact import FINGERPRINT

SAVE = """
import sys
from oscar_sglang.artifact import file as art, kept
f = art.Fingerprint("LlamaForCausalLM", 1, 2, 1, 16, "{}", "{}", "0")
print(kept.save_temporary(art.data_free(f)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def other(cache):
    """Another process that holds a temporary artifact: (process, file)."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.wait()


def left(cache: Path) -> list[Path]:
    return sorted(p for p in cache.parent.iterdir() if "oscar_sglang" in p.name)


def test_the_same_artifact_is_the_same_file(cache):
    made = art.data_free(FINGERPRINT)
    first = kept.keep(made)
    before = first.stat()
    assert kept.keep(made) == first and first.parent == cache and made.id in first.name
    assert first.stat().st_mtime_ns == before.st_mtime_ns and not left(cache)
    assert art.load(first).id == made.id
    assert kept.keep(art.data_free(FINGERPRINT, "aligned")) != first
    assert len(list(cache.iterdir())) == 2


def test_a_damaged_one_is_made_again(cache):
    made = art.data_free(FINGERPRINT)
    path = kept.keep(made)
    path.write_bytes(path.read_bytes()[:-100])
    assert art.load(kept.keep(made)).id == made.id


def test_a_cache_that_cannot_be_written_costs_a_temporary_file(cache, monkeypatch, caplog):
    original = os.replace

    def full(source, target):
        if Path(target).parent == cache:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(source, target)

    monkeypatch.setattr(os, "replace", full)
    path = kept.keep(art.data_free(FINGERPRINT))
    assert path.parent != cache and art.load(path) and "No space left" in caplog.text


def test_what_a_killed_process_left_goes_with_the_next(cache, other):
    process, file = other
    assert art.load(file)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert file.exists(), "nobody could tidy up"
    mine = kept.save_temporary(art.data_free(FINGERPRINT))
    assert not file.parent.exists() and left(cache) == [mine.parent]


def test_what_a_living_process_needs_stays(cache, other):
    _, file = other
    mine = kept.save_temporary(art.data_free(FINGERPRINT))
    again = kept.save_temporary(art.data_free(FINGERPRINT))
    assert file.exists() and mine.exists() and again.exists()
