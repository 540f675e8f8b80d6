"""Ranks recognise their job by its signature: strangers can neither open it, nor claim a rank, nor count as somebody who came."""

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from phalanx.comm import rendezvous
from phalanx.comm.failure import CommunicationError
from phalanx.comm.launch import Launch
from phalanx.comm.meeting import WrongJobError, claim, find_job, keys_of, open_job, wait_for_all
from phalanx.comm.notes import private_folder

SECONDS = datetime.timedelta(seconds=20)
PREFIX = "phalanx/0/0"
LOCAL = Launch(how="environment", rank=0, world=2, address="127.0.0.1", port=1)
REMOTE = replace(LOCAL, address="10.9.8.7")
SECRET = "a secret of this job"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("PHALANX_SECRET", raising=False)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 1, True, SECONDS, wait_for_workers=False)


def client(store):
    return dist.TCPStore("127.0.0.1", store.port, 1, False, SECONDS, wait_for_workers=False)


def come(store, launch, results, seconds=20.0):
    """One rank's part of a meeting, in a thread of its own."""

    def run():
        deadline = time.monotonic() + seconds
        base = client(store)
        try:
            with contextlib.ExitStack() as until_met:
                if launch.rank == 0:
                    meeting = open_job(base, PREFIX, launch, deadline, until_met)
                else:
                    meeting = find_job(base, PREFIX, launch, deadline)
                claim(meeting.keys, launch.rank, "here")
                missing = wait_for_all(meeting, launch, deadline, 0.2)
            results[launch.rank] = (missing, meeting.token, meeting.signer is not None)
        except RuntimeError as error:
            results[launch.rank] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def meet(store, launch, before=lambda keys: None, between=lambda keys: None, seconds=20.0):
    """What a meeting comes to on two ranks; a stranger acts before, and after rank 0 has spoken."""
    strangers, results = dist.PrefixStore(PREFIX, client(store)), {}
    before(strangers)
    first = come(store, launch, results, seconds)
    time.sleep(0.1)
    between(strangers)
    second = come(store, replace(launch, rank=1), results, seconds)
    for thread in (first, second):
        thread.join(40)
    return results


@pytest.mark.parametrize(
    ("launch", "exported", "signs"), [(LOCAL, False, True), (LOCAL, True, True), (REMOTE, True, True), (REMOTE, False, False)]
)
def test_ranks_of_a_job_meet_and_leave_no_note(store, monkeypatch, launch, exported, signs):
    if exported:
        monkeypatch.setenv("PHALANX_SECRET", SECRET)
    results = meet(store, launch)
    assert results[0] == results[1]
    assert results[0][0] == []
    assert results[0][2] is signs
    if launch is LOCAL:
        assert list(private_folder().iterdir()) == []
    values = [client(store).get(key) for key in client(store).list_keys()]
    assert not any(SECRET.encode() in value for value in values)


def forged_job(keys):
    keys.set("job", json.dumps({"world": 2, "job": "", "token": "0" * 16}))


def forged_path(keys):
    keys.set("job", "0" * 64 + " " + json.dumps({"world": 2, "job": "", "token": "../../../../x"}))


def nonsense(keys):
    keys.set("job", b"\xff" * 100)


def a_deep_one(keys):
    keys.set("job", "[" * 100_000)


def forged_claims(keys):
    for rank in range(2):
        keys.set(f"rank/{rank}", "stranger")


def forged_absence(keys):
    keys.set("absent", "0 1")
    keys.set("met", "")


def deleted(keys):
    keys.delete_key("job")


@pytest.mark.parametrize("act", [forged_job, forged_path, nonsense, a_deep_one, forged_claims, forged_absence, deleted])
@pytest.mark.parametrize("when", ["before", "between"])
def test_strangers_keep_nobody_from_meeting(store, act, when):
    results = meet(store, LOCAL, **{when: act})
    assert results[0] == results[1]
    assert results[0][0] == []


def test_who_has_not_come_is_named_though_a_stranger_says_that_he_has(store):
    results = {}
    keys = dist.PrefixStore(PREFIX, client(store))
    keys.set("here/1", "")
    keys.add("here", 2)
    come(store, LOCAL, results, seconds=0.6).join(20)
    assert results[0][0] == [1]


@pytest.mark.parametrize(
    ("launch", "exported", "act", "words"),
    [
        (LOCAL, False, forged_job, "choose another MASTER_PORT"),  # a rank of one host wants a signature
        (LOCAL, False, nonsense, "choose another MASTER_PORT"),
        (REMOTE, True, forged_job, "another PHALANX_SECRET than this rank"),
        (
            REMOTE,
            False,
            lambda keys: keys.set("job", "0" * 64 + ' {"world": 2, "job": "", "token": "' + "0" * 16 + '"}'),
            "does not have",
        ),
        (replace(LOCAL, world=3), False, forged_job, "has 2 ranks, this one has 3"),
    ],
)
def test_a_rank_that_finds_another_job_leaves_at_once_and_says_why(store, monkeypatch, launch, exported, act, words):
    if exported:
        monkeypatch.setenv("PHALANX_SECRET", SECRET)
    act(dist.PrefixStore(PREFIX, client(store)))
    begun = time.monotonic()
    with pytest.raises(WrongJobError, match=words):
        find_job(client(store), PREFIX, replace(launch, rank=1), begun + 30)
    assert time.monotonic() - begun < 15


def test_a_rank_that_was_started_twice_finds_its_rank_taken(store):
    with contextlib.ExitStack() as until_met:
        meeting = open_job(client(store), PREFIX, LOCAL, time.monotonic() + 20, until_met)
        claim(meeting.keys, 0, "here")
        again = keys_of(client(store), PREFIX, meeting.signer, 5.0)
        with pytest.raises(WrongJobError, match="another process is rank 0"):
            claim(again, 0, "here")
        assert os.listdir(private_folder()) == [f"secret-{meeting.token}"]
    assert os.listdir(private_folder()) == []


def test_what_is_wrong_with_this_host_is_not_blamed_on_rank_0(monkeypatch, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    private_folder().chmod(0o755)
    with pytest.raises(CommunicationError, match="not a private folder of this user") as caught:
        rendezvous.meet(replace(LOCAL, port=port), 5.0)
    assert "does not answer" not in str(caught.value)
    monkeypatch.setenv("PHALANX_SECRET", "short")
    with pytest.raises(CommunicationError, match="fewer than 16"):
        rendezvous.meet(replace(LOCAL, port=port), 5.0)
