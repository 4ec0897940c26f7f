"""A real SGLang server in a child process, for tests and scripts."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def free_port() -> int:
    """Below the ports that the system hands out by itself: a server binds its own only when the
    model is loaded, and until then another process could be given it."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


class Client:
    """HTTP to a server on this machine: ``Client(30000).generate(ids)``."""

    def __init__(self, port: int) -> None:
        self.port = port

    def request(self, path: str, body: dict | None = None, timeout: float = 300):
        """POST ``body`` as JSON (GET without one); returns parsed JSON or text."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith(("[", "{")) else text

    def generate(self, ids: list[int], new_tokens: int = 1, **options) -> dict:
        """Greedy ``/generate`` on token ids."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return self.request("/generate", {"input_ids": ids, "sampling_params": sampling, **options})

    def state(self) -> dict:
        """The ``oscar`` block of /server_info."""
        return self.internal_state()["oscar"]

    def internal_state(self) -> dict:
        return self.request("/server_info")["internal_states"][0]

    def flush(self) -> None:
        for _ in range(100):  # refused while a request is still being retired
            try:
                self.request("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                time.sleep(0.1)
        raise TimeoutError("/flush_cache was refused for 10 s")

    def answers(self) -> bool:
        """Whether anything listens: a little later than the log says so."""
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def load(self) -> dict:
        """Requests and tokens in use now; tokens of the prefix cache are not in use."""
        return self.request("/v1/loads?include=core")["loads"][0]

    def abort_all(self) -> None:
        """Abort every request and wait until none is left."""
        self.request("/abort_request", {"rid": "", "abort_all": True})
        for _ in range(600):
            load = self.load()
            if not load["num_running_reqs"] + load["num_waiting_reqs"]:
                return
            time.sleep(0.1)
        raise TimeoutError("requests were still running 60 s after /abort_request")


class Server(Client):
    """``with Server(model, log, "--kv-cache-dtype", "int2", ...) as s: s.post(...)``

    Starts ``python -m oscar_sglang.launch_server``; on exit the whole process group is killed.
    """

    def __init__(self, model: Path, log: Path, *args: str, env: dict | None = None, timeout=300):
        super().__init__(free_port())
        self.log = Path(log)
        self.timeout = timeout
        self.command = [
            *(sys.executable, "-m", "oscar_sglang.launch_server", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--skip-server-warmup"),
            *("--nccl-port", str(free_port())),  # SGLang's own choice others may take meanwhile
            *args,
        ]
        self.env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
            **(env or {}),
        }

    def __enter__(self) -> Server:
        self.log.write_text("")
        self.process = self.start()
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server exited with {self.process.returncode}:\n{self.tail()}")
            if "The server is fired up" in self.log.read_text(errors="replace") and self.answers():
                return self
            time.sleep(0.3)
        self.__exit__()
        raise TimeoutError(f"server did not start in {self.timeout} s:\n{self.tail()}")

    def start(self) -> subprocess.Popen:
        """The process, in a session of its own; what it says is appended to the log."""
        with self.log.open("a") as out:
            return subprocess.Popen(
                self.command, stdout=out, stderr=out, env=self.env, start_new_session=True
            )

    def __exit__(self, *_exc) -> None:
        self.kill()

    def kill(self) -> None:
        """End it with all that it has started."""
        try:
            os.killpg(self.process.pid, 9)
        except ProcessLookupError:
            pass
        self.process.wait()

    def tail(self, characters: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-characters:]
