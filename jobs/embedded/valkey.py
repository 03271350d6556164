"""The Valkey server that comes with Headrace: one a data folder, shared by the processes that use it.

Every user holds a shared lock on `users.lock` for as long as it uses the server. The supervisor
(`supervisor.py`) waits for the exclusive lock, which the kernel gives it when the last user is gone,
however it went, and then stops the server. Nothing counts users and no pid is trusted.

The supervisor imports this module, and everyone waits for it: only the standard library.
"""

import fcntl
import hashlib
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote

START_SECONDS = 30.0
# What a supervisor answers if nothing failed.
READY, BUSY = "ready", "busy"
_POLL_SECONDS = 0.02
# What a server answers to a ping, and what one that cannot write, as its disk is full, answers to all but reading.
_PONG, _REFUSAL = b"+PONG", b"-MISCONF"
# sun_path holds 108 bytes on Linux with the closing zero, 104 elsewhere.
_MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103


class EmbeddedValkeyError(ConnectionError):
    """The embedded Valkey could not be started or reached; the message says why."""


@dataclass(frozen=True)
class ValkeyPaths:
    """The files of one data folder's server, in `DATA_DIR/valkey`."""

    folder: Path

    @classmethod
    def of(cls, data_dir: Path) -> Self:
        return cls(data_dir.resolve() / "valkey")

    @property
    def users_lock(self) -> Path:
        return self.folder / "users.lock"

    @property
    def start_lock(self) -> Path:
        return self.folder / "start.lock"

    @property
    def supervisor_lock(self) -> Path:
        return self.folder / "supervisor.lock"

    @property
    def server_lock(self) -> Path:
        return self.folder / "server.lock"

    @property
    def log(self) -> Path:
        return self.folder / "valkey.log"

    @property
    def append_only_folder(self) -> Path:
        return self.folder / "appendonlydir"

    @property
    def socket(self) -> Path:
        """The server's socket: here, or in a short private folder when this path is too long for one."""
        here = self.folder / "valkey.sock"
        return here if len(os.fsencode(here)) <= _MAX_SOCKET_PATH_BYTES else self._short_folder / "valkey.sock"

    def create(self) -> None:
        """Make the folders, private to this user. Raises EmbeddedValkeyError if one is someone else's."""
        for folder in {self.folder, self.socket.parent}:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)

    def remove_short_folder(self) -> None:
        """Leave nothing behind outside of the data folder; for when the server has ended."""
        if self.socket.parent != self.folder:
            shutil.rmtree(self.socket.parent, ignore_errors=True)

    @property
    def _short_folder(self) -> Path:
        # Not TMPDIR: processes with different environments must find the same socket.
        key = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
        return Path("/tmp", f"headrace-{os.geteuid()}-{key}")


class EmbeddedValkey:
    """This process's use of its data folder's server; a context manager.

    The server runs at least until `close`, and not longer than its last user. Not to be shared between
    threads while entering or closing; `ensure` may be called from any.
    """

    def __init__(self, data_dir: Path) -> None:
        self._paths = ValkeyPaths.of(data_dir)
        self._users_lock: int | None = None

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._paths.socket))}"

    def __enter__(self) -> Self:
        assert self._users_lock is None, "entered twice"
        self._paths.create()
        # Blocks while a supervisor that found no user is stopping its server.
        self._users_lock = _lock(self._paths.users_lock, fcntl.LOCK_SH, START_SECONDS)
        try:
            self.ensure()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop using the server, which ends it if nobody else does. Harmless when repeated."""
        if self._users_lock is not None:
            # Closing, not unlocking: a forked child that inherited the descriptor still uses the server.
            os.close(self._users_lock)
            self._users_lock = None

    def ensure(self) -> None:
        """Return once the server answers, having started a supervisor if there was none. Cheap.

        The supervisor restarts a dead server by itself. Call this now and then to survive its own death too.
        Raises EmbeddedValkeyError; of a server that cannot write at once, as waiting would not help.
        """
        if self._users_lock is None:
            raise EmbeddedValkeyError("the embedded Valkey is used no longer, as its client was closed: make another")
        if self._answers():
            return
        if not self._paths.folder.is_dir():
            raise EmbeddedValkeyError(
                f"embedded Valkey: {self._paths.folder} was removed while it was used: stop every headrace that uses "
                "it and start again"
            )
        deadline = time.monotonic() + START_SECONDS
        start_lock = _lock(self._paths.start_lock, fcntl.LOCK_EX, START_SECONDS)
        try:
            while not self._answers():
                if not _is_locked(self._paths.supervisor_lock):
                    _start_supervisor(self._paths)
                if time.monotonic() > deadline:
                    raise EmbeddedValkeyError(failure(self._paths, f"no answer after {START_SECONDS:.0f} s"))
                time.sleep(_POLL_SECONDS)
        finally:
            os.close(start_lock)

    def _answers(self) -> bool:
        said = _reply(self._paths.socket)
        if said.startswith(_REFUSAL):
            problem = said[1:].decode(errors="replace").strip()
            raise EmbeddedValkeyError(f"embedded Valkey cannot write to {self._paths.folder}: {problem}")
        return said.startswith(_PONG)


def answers(socket_path: Path) -> bool:
    """Whether a server on this socket is ready for commands (one that still loads its data is not)."""
    return _reply(socket_path).startswith(_PONG)


def hangs(socket_path: Path) -> bool:
    """Whether there is a server on this socket that does not say a word."""
    try:
        _ask(socket_path)
    # The latter of one that has not taken connections for long.
    except (TimeoutError, BlockingIOError):
        return True
    except OSError:
        pass
    return False


def _reply(socket_path: Path) -> bytes:
    """What a server on this socket answers to a ping; nothing where there is none."""
    try:
        return _ask(socket_path)
    except OSError:
        return b""


def _ask(socket_path: Path) -> bytes:
    """Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        connection.connect(str(socket_path))
        connection.sendall(b"PING\r\n")
        return connection.recv(256)


def failure(paths: ValkeyPaths, reason: str) -> str:
    """Say why the server failed, with the end of its log."""
    lines = paths.log.read_text(errors="replace").splitlines()[-5:] if paths.log.exists() else []
    return "\n  ".join([f"embedded Valkey: {reason} (log: {paths.log})", *lines])


def _start_supervisor(paths: ValkeyPaths) -> None:
    """Start the supervisor, detached, and return when its server answers or another turns out to start one."""
    # -P: without it Python would look for our modules in the working directory first.
    command = [sys.executable, "-P", "-m", "headrace.jobs.embedded.supervisor", str(paths.folder)]
    with (
        open(paths.log, "ab") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            cwd="/",
        ) as starter,
    ):
        assert starter.stdout is not None
        readable, _, _ = select.select([starter.stdout], [], [], START_SECONDS)
        verdict = starter.stdout.readline().decode().strip() if readable else "the supervisor does not answer"
    if verdict not in (READY, BUSY):
        raise EmbeddedValkeyError(failure(paths, verdict or "the supervisor died"))


def _lock(path: Path, operation: int, seconds: float) -> int:
    """Open `path` and lock it within `seconds`; returns the descriptor, whose closing unlocks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + seconds
    while not try_lock(descriptor, operation):
        if time.monotonic() > deadline:
            os.close(descriptor)
            raise EmbeddedValkeyError(f"embedded Valkey: {path} stayed locked for {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
    return descriptor


def try_lock(descriptor: int, operation: int) -> bool:
    """Lock at once or not at all."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EmbeddedValkeyError(f"embedded Valkey: {folder} is not a folder of this user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
