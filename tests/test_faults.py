"""Faults around a request or a machine stay where they are."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from oscar_sglang.artifact import file as art
from oscar_sglang.calibration import Plan, auto, ensure_artifact
from scripts.lib.tiny_models import llama
from tests.test_reference import WINDOWS, Pool, Sequence, assert_close, decoded, dense

BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "fp16 overflow": 1e30}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_one_requests_nan_stays_its_own(value, what):
    """Prefill and decode beside a request whose activations are broken: bit-equal outputs."""
    outputs = []
    for broken in (False, True):
        pool = Pool(WINDOWS[0])
        seqs = [Sequence(50, row=i + 1, seed=20 + i) for i in range(3)]
        if broken:
            getattr(seqs[1], what)[5:30:4, 0, ::7] = value
        for seq in seqs:
            pool.start(seq, 0)
        steps = [pool.step(*((s, a, b) for s in seqs)) for a, b in ((0, 30), (30, 49), (49, 50))]
        outputs.append([torch.cat([step[i] for step in steps]) for i in (0, 2)])
    for good, beside in zip(*outputs, strict=True):
        assert torch.isfinite(beside).all() and torch.equal(good, beside)


def test_slots_and_rows_of_a_broken_request_are_reusable():
    pool, broken = Pool(WINDOWS[0]), Sequence(60, row=1, seed=30)
    broken.k[:] = broken.v[:] = torch.nan
    pool.start(broken, 0)
    pool.step((broken, 0, 60))
    heir = Sequence(60, row=1, seed=31, slots=broken.slots.flip(0))
    pool.start(heir, 0)
    pool.step((heir, 0, 40))
    (out,) = pool.step((heir, 40, 60))
    assert_close(out, dense(heir, *decoded(pool.seg, heir), 40, 60, WINDOWS[0]))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OSCAR_SGLANG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("model"))


def test_a_full_disk_costs_the_file_and_not_the_start(model, cache, monkeypatch, caplog):
    def full(_fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    artifact, path, created = ensure_artifact(Plan(model, tokens=600), "aligned")
    assert (path, created, len(artifact.layers)) == (None, True, 2)
    assert "without keeping it" in caplog.text and "No space left" in caplog.text
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"], "a piece was left behind"


def test_a_read_only_cache_costs_the_file_and_not_the_start(model, cache, monkeypatch, caplog):
    def read_only(*_args, **_kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(auto.FileLock, "acquire", read_only)
    artifact, path, created = ensure_artifact(Plan(model, tokens=600), "aligned")
    assert (path, created, len(artifact.layers)) == (None, True, 2)
    assert "Read-only file system" in caplog.text and "OSCAR_SGLANG_CACHE" in caplog.text


CALIBRATE = """
import sys
from oscar_sglang.calibration import Plan, ensure_artifact
made, path, created = ensure_artifact(Plan(sys.argv[1], tokens=600), "aligned")
print(made.id, created)
"""
HOLD = """
import sys, time
from pathlib import Path
from oscar_sglang.calibration.auto import _lock
lock = _lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def python(code, *args) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE, text=True
    )


def test_two_processes_calibrate_once(model, cache):
    both = [python(CALIBRATE, model) for _ in range(2)]
    lines = [p.communicate(timeout=300)[0].split() for p in both]
    assert lines[0][0] == lines[1][0]
    assert sorted(created for _, created in lines) == ["False", "True"]


def test_a_killed_calibration_does_not_block_the_next(model, cache):
    path = auto.artifact_path(art.Fingerprint.of(model), "aligned")
    cache.mkdir()
    holder = python(HOLD, path)
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    begin = time.monotonic()
    assert ensure_artifact(Plan(model, tokens=600), "aligned")[1] == path
    assert time.monotonic() - begin < 60
