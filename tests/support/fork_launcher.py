"""Start the launcher many times for the price of one import: each case is a fork of this process.

stdin: JSON list of {"argv": [...], "env": {...}}; stdout: JSON list of {"code": int, "output": str}
"""

import json
import os
import sys
import tempfile


def run(case: dict) -> dict:
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            os.environ.update(case.get("env", {}))
            code = 70
            try:
                launch_server.main(case["argv"])
                code = 0
            except SystemExit as error:
                if isinstance(error.code, str):
                    print(error.code, file=sys.stderr)
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "output": out.read()}


if __name__ == "__main__":
    from oscar_sglang import launch_server

    launch_server.enter_cpu_mode()
    import sglang.launch_server  # noqa: F401  (the expensive import)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    cases = json.load(sys.stdin)
    print(json.dumps([run(case) for case in cases]))
