"""Main program of each rank of `booster run`: runs the user's script as `python script.py` would, and reports failures.

It imports only the standard library, so that the script still controls what happens before torch is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import io
import json
import logging
import os
import runpy
import signal
import sys
import time
import traceback
import types
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> None:
    """Run `script.py args...` or `-m module args...`; exits the process if the script failed."""
    faulthandler.enable()  # a stack for SIGSEGV and the like
    if sys.platform == "linux":  # terminate with the launcher, even if that is killed by SIGKILL
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if isinstance(sys.stdout, io.TextIOWrapper):  # line-buffered, also under PYTHONUNBUFFERED: ranks share it
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            if not getattr(sys.flags, "safe_path", False):  # Python 3.11 has it
                sys.path[0] = os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            _run_script(arguments[0], arguments[1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)  # as the interpreter does
        if code != 0:
            _fail(error, code, show=isinstance(error.code, str))
    except KeyboardInterrupt as error:
        _fail(error, 128 + signal.SIGINT, show=False)  # the launcher reports it once for all ranks
    except Exception as error:
        _fail(error, 1, show=True)


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    path = os.path.abspath(path)
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 has it
        sys.path[0] = os.path.dirname(path)
    # A module that is never removed: unlike runpy's, it still exists when threads and atexit functions use it, and
    # spawned processes find the script by it.
    module: Any = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = path, __builtins__
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - running the user's script is what this is for


def _fail(error: BaseException, code: int, *, show: bool) -> None:
    """Print the error, write the report for the launcher, and exit after the atexit functions ran."""
    sys.last_value = error  # as the interpreter does: atexit functions see that this process failed
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next  # frames of this launcher
    error = error.with_traceback(trace)
    _write_report(error)
    if show and isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
    elif show:
        sys.excepthook(type(error), error, error.__traceback__)
    _exit_state["code"] = code
    sys.exit(code)


def _write_report(error: BaseException) -> None:
    """Write the error file of torch's elastic agent, with the time in nanoseconds: ranks often fail within a second."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time_ns()
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(now // 10**9),
        "time_ns": now,
        "exception": type(error).__name__,
    }
    report = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    # A full disk must not hide the script's own error, which goes to stderr as well. A rank may be killed while it
    # writes, and torch's launcher fails at a part of a report.
    with contextlib.suppress(OSError):
        with open(f"{path}.part", "w") as file:
            json.dump(report, file)
        os.replace(f"{path}.part", path)


# The destructor of a process group waits for queued collectives until their timeout, as other ranks never join them. A
# failed rank would delay the launcher, and so all other ranks, by many minutes. So it exits without destructors after
# all atexit functions: `_exit_without_destructors` is registered first, and they run in reverse order.
_exit_state: dict[str, int] = {}


def _exit_without_destructors() -> None:
    if "code" in _exit_state:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by the script, or its reader is gone
                stream.flush()
        os._exit(_exit_state["code"])


if __name__ == "__main__":
    atexit.register(_exit_without_destructors)
    main(sys.argv[1:])
