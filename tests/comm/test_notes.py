"""Notes of one user on one host: private, whole, and nothing else than a file of this user's own is taken for one."""

import os
import stat
import time

import pytest

from phalanx.comm.launch import LaunchError
from phalanx.comm.notes import STALE, Note, read, secret_path, sweep, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_note_is_private_whole_and_gone_when_removed():
    note, same = Note({}), Note({})
    assert note.path == same.path
    assert Note({"PMIX_NAMESPACE": "prterun-h-1@1/2"}).path != note.path
    assert note.read(time.monotonic() + 0.05) is None
    before = os.umask(0)
    try:
        note.leave("4711")
    finally:
        os.umask(before)
    assert same.read(time.monotonic() + 1) == "4711"
    assert stat.S_IMODE(note.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(note.path.stat().st_mode) == 0o600
    assert list(note.path.parent.iterdir()) == [note.path]
    note.remove()
    note.remove()
    assert not note.path.exists()


def test_secrets_of_jobs_that_were_killed_are_removed_after_a_day():
    old, new = secret_path("0" * 16), secret_path("1" * 16)
    for path in (old, new):
        write(path, "secret")
    os.utime(old, (time.time() - STALE - 60,) * 2)
    sweep()
    assert [path.exists() for path in (old, new)] == [False, True]


def test_a_folder_that_others_can_write_to_is_refused():
    Note({}).path.parent.chmod(0o777)
    with pytest.raises(LaunchError, match="private"):
        Note({})


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"phalanx-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="private"):
        secret_path("0" * 16)


def link(path):
    write(path.with_name("other"), "forged")
    path.symlink_to(path.with_name("other"))


def readable(path):
    path.write_text("forged")
    path.chmod(0o644)


def foreign(path):
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    write(path, "forged")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("make", [link, os.mkfifo, os.mkdir, readable, foreign], ids=lambda make: make.__name__)
def test_what_is_no_file_of_this_user_alone_is_no_note(make):
    path = secret_path("0" * 16)
    make(path)
    with pytest.raises(LaunchError, match="not a note of this user"):
        read(path)


@pytest.mark.parametrize("token", ["", "x" * 16, "../../etc/passwd", "0" * 15, "0" * 17, "../0123456789abc", "0123456789ABCDEF"])
def test_a_token_is_no_path(token):
    with pytest.raises(ValueError, match="no token"):
        secret_path(token)
