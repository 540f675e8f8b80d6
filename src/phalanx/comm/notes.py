"""Notes between processes of one user on one host, in files that no other user can read, write or replace.

The folder is in the temporary folder and has mode 0700; files have mode 0600. Readers check the file they have opened, and
refuse links, files of another user, and files that others can open.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from phalanx.comm.launch import LAUNCHERS, LaunchError
from phalanx.comm.processes import look_up

LONGEST = 4096  # maximum bytes of a note
STALE = 24 * 3600.0  # seconds after which a secret must be left from a job that was killed before its ranks had met


class Note:
    """A file with the port of rank 0's store, for the other ranks under the same mpirun.

    It is named after the launcher process that all of them descend from, with its start time, because process ids are reused.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.path = private_folder() / f"{environ.get('PMIX_NAMESPACE', '').replace('/', '_')}{_launcher_process()}"

    def leave(self, text: str) -> None:
        write(self.path, text)

    def read(self, deadline: float) -> str | None:
        while time.monotonic() < deadline:
            if (text := read(self.path)) is not None:
                return text
            time.sleep(0.02)
        return None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def is_token(text: str) -> bool:
    """Whether `text` is 16 hex digits, and so cannot be a path."""
    return len(text) == 16 and set(text) <= set("0123456789abcdef")


def secret_path(token: str) -> Path:
    """Return where rank 0 leaves the secret of the job with this token."""
    if not is_token(token):
        raise ValueError(f"{token!r} is no token")
    return private_folder() / f"secret-{token}"


def sweep() -> None:
    """Remove the secrets of jobs that were killed before all ranks had met."""
    for path in private_folder().glob("secret-*"):
        with contextlib.suppress(FileNotFoundError):  # another process may sweep too
            if time.time() - path.lstat().st_mtime > STALE:
                path.unlink()


def write(path: Path, text: str) -> None:
    """Write a note. Readers see all of it or nothing."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(number, "w") as file:
        file.write(text)
    part.rename(path)


def read(path: Path) -> str | None:
    """Return the text of the note, or None if there is none."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(f"{path} is not a note of this user ({error.strerror}): remove it, or set TMPDIR") from None
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise LaunchError(f"{path} is not a note of this user: remove it, or set TMPDIR")
        return os.read(number, LONGEST).decode()
    finally:
        os.close(number)


def private_folder() -> Path:
    """Create the folder if it is missing. Raise LaunchError if it belongs to another user, or others can read it."""
    folder = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LaunchError(f"{folder} is not a private folder of this user: remove it, or set TMPDIR")
    return folder


def _launcher_process() -> str:
    """Return `pid-starttime` of the nearest ancestor that is an MPI launcher, or else of the parent."""
    parent = pid = os.getppid()
    while pid > 1 and (found := look_up(pid)):
        if found.name in LAUNCHERS:
            parent = pid
            break
        pid = found.parent
    found = look_up(parent)
    return f"{parent}-{found.started if found else ''}"
