"""A process that has imported SGLang and forks: what it starts need not import it again.

    python -m tests.support.fork_server FD      (``tests.support.forks`` starts it)

FD is a socket. A request names a module, which a fork runs as ``python -m`` would; the answer is
its pid and, when it has ended, its exit status. A server's scheduler and detokenizer are forks too,
where SGLang starts Python anew; SGLang's ``reset_context`` gives them the state of a new process.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback
import warnings

from oscar_sglang.launch_server import enter_cpu_mode, has_gpu

CRASHED = 70  # exit status of a program that ended with a traceback
POLL = 0.05  # seconds between looks for forks that have ended


def import_sglang() -> None:
    if not has_gpu():
        enter_cpu_mode()
    import sglang.launch_server  # noqa: F401
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # It decides at its import whether several processes share their metrics.
    assert "prometheus_client" not in sys.modules


def fork_instead_of_spawn() -> None:
    """Of multiprocessing, in this process; who asks for "spawn" later, asks in vain."""
    from sglang.srt.runtime_context import reset_context

    multiprocessing.set_start_method("fork", force=True)
    context = multiprocessing.get_context("fork")
    multiprocessing.set_start_method = lambda *_args, **_options: None
    multiprocessing.get_context = lambda _method=None: context
    run = multiprocessing.process.BaseProcess.run

    def run_in_a_new_state(self) -> None:
        reset_context()
        random.seed()
        for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        run(self)

    multiprocessing.process.BaseProcess.run = run_in_a_new_state


def become(request: dict) -> None:
    """The program that was asked for, from here to its end."""
    os.setsid()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    fork_instead_of_spawn()
    sys.argv = [request["module"], *request["argv"]]
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def fork(request: dict, connection: socket.socket) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    connection.close()
    code = CRASHED
    try:
        become(request)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(connection: socket.socket) -> None:
    """Until the other side is gone; then nothing that was started stays."""
    running: set[int] = set()
    while True:
        if select.select([connection], [], [], POLL)[0]:
            if not (request := connection.recv(1 << 20)):
                break
            running.add(pid := fork(json.loads(request), connection))
            connection.send(json.dumps({"pid": pid}).encode())
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            running.discard(ended[0])
            code = os.waitstatus_to_exitcode(ended[1])
            connection.send(json.dumps({"pid": ended[0], "code": code}).encode())
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    import_sglang()
    serve(socket.socket(fileno=int(sys.argv[1])))
