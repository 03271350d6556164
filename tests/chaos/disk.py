"""A small disk of a folder's own, where this process may mount one."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_BYTES = 24 * 2**20


class Disk:
    """`reason`: why there is none, and what was to be done to it is left out."""

    def __init__(self, folder: Path, reason: str | None) -> None:
        self.folder, self.reason = folder, reason

    @contextmanager
    def full(self) -> Iterator[None]:
        """Not a byte more can be written."""
        ballast = self.folder / ".ballast"
        try:
            with ballast.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(2**16))
            assert shutil.disk_usage(self.folder).free == 0
            yield
        finally:
            ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "headrace-chaos", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        reason = None if done.returncode == 0 else done.stderr.strip()
    except FileNotFoundError as error:
        reason = str(error)
    try:
        yield Disk(folder, reason)
    finally:
        if reason is None:
            # Lazily: whoever still looks at it keeps it until then.
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
