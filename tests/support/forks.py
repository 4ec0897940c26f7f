"""Programs that begin with SGLang imported: forks of one process for each environment."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of the environment what may differ between forks of a process: SGLang and what it imports read
# some variables at their import, ours are read when they are needed.
OURS = ("OSCAR_", "PYTEST_")
KEPT = 2  # processes that wait for another request


class Fork:
    """As much of ``subprocess.Popen`` as servers need."""

    def __init__(self, parent: Parent, pid: int) -> None:
        self.parent, self.pid = parent, pid

    @property
    def returncode(self) -> int | None:
        return self.parent.ended.get(self.pid)

    def poll(self) -> int | None:
        self.parent.listen(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            rest = None if deadline is None else deadline - time.monotonic()
            if rest is not None and rest <= 0:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            self.parent.listen(rest)
        return self.returncode


class Parent:
    """A ``fork_server`` and what it has told."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.started: set[int] = set()
        self.ended: dict[int, int] = {}

    def start(self, **request) -> Fork:
        before = set(self.started)
        self.connection.send(json.dumps(request).encode())
        while before == self.started:
            self.listen(None)
        (pid,) = self.started - before
        return Fork(self, pid)

    def listen(self, timeout: float | None) -> None:
        """Read all that has been said; wait for something at most ``timeout`` seconds."""
        while select.select([self.connection], [], [], timeout)[0]:
            if not (said := self.connection.recv(1 << 16)):
                raise RuntimeError(f"the process to fork ended with {self.process.wait()}")
            message = json.loads(said)
            if "code" in message:
                self.ended[message["pid"]] = message["code"]
            else:
                self.ended.pop(message["pid"], None)  # pids come round
                self.started.add(message["pid"])
            timeout = 0

    def idle(self) -> bool:
        self.listen(0)
        return self.started <= self.ended.keys()

    def close(self) -> None:
        self.connection.close()
        self.process.wait()


_parents: dict[frozenset, Parent] = {}  # the one used last comes last


def start(
    module: str, argv: list[str], env: dict[str, str], stdout: Path, stderr: Path | None = None
) -> Fork:
    """``python -m MODULE ARGV`` in a fork with these variables; what it says is appended."""
    key = frozenset((k, v) for k, v in env.items() if not k.startswith(OURS))
    parent = _parents.pop(key, None)
    if parent is None:
        idle = [k for k, p in _parents.items() if p.idle()]
        for old in idle[: max(0, len(_parents) - KEPT + 1)]:
            _parents.pop(old).close()
        parent = Parent(dict(env))
    _parents[key] = parent
    return parent.start(
        module=module,
        argv=list(map(str, argv)),
        env=dict(env),
        stdout=str(stdout),
        stderr=str(stderr or stdout),
    )
