import os
import re

import pytest

from oscar_sglang.launch_server import enter_cpu_mode, has_gpu

if not has_gpu():
    enter_cpu_mode()  # before anything imports transformers or sglang

# In continuous integration a test may be skipped for want of a GPU (or for having one), or of a
# model that no package holds; a tool that is missing there would let a whole tier go unrun.
STRICT = bool(os.environ.get("OSCAR_CI") or os.environ.get("CI"))
MAY_SKIP = re.compile(r"needs a (CUDA )?GPU|on a CPU|without a GPU only|OSCAR_NANO_MODEL")


def refuse_skip(report):
    """``report``, as a failure if it is of a test that must not be skipped here."""
    if STRICT and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not MAY_SKIP.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}; in CI this must run"
    return report


def pytest_collection_modifyitems(items):
    """Files that run SGLang come first: what takes minutes must not begin last, with one of two
    workers idle (``--dist loadfile`` gives out files in this order)."""
    long = {item.path for item in items if item.get_closest_marker("sglang")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return refuse_skip((yield))
