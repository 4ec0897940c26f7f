"""Servers that begin with SGLang imported: for tests of what one does, not of how it starts."""

from __future__ import annotations

from scripts.lib import server
from tests.support import forks


class Server(server.Server):
    """``scripts.lib.server.Server``, forked."""

    def start(self) -> forks.Fork:
        assert self.command[1:3] == ["-m", "oscar_sglang.launch_server"]
        return forks.start(self.command[2], self.command[3:], self.env, self.log)
