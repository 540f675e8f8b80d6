"""`phalanx train` with local steps: settings, evaluation of the mean, checkpoints that continue."""

from dataclasses import replace

import pytest
from tests.train.runs import TINY, rows
from tests.train.runs import run as train_on_threads

from phalanx import DiLoCo, Int8, LocalSGD
from phalanx.cli.train import resolve
from phalanx.train.config import ConfigError
from phalanx.train.local_steps import LocalConfig
from phalanx.train.update import CommConfig

LOCAL = LocalConfig(every=3, fragments=2, overlap=1)


def test_settings_become_the_value_that_the_optimizer_takes():
    comm = resolve(
        "digits", ["comm.sync=diloco", "comm.local.every=20", "comm.local.fragments=4", "comm.local.outer_rate=0.5"]
    ).comm
    assert comm.local.of(comm.sync) == DiLoCo(20, {"lr": 0.5, "momentum": 0.9, "nesterov": True}, 4, 0)
    assert LocalConfig(every=7, overlap=2, start=9).of("local-sgd") == LocalSGD(7, overlap=2, start=9)
    assert LocalConfig(start=9).of("diloco").start == 9
    with pytest.raises(ValueError, match="at most one part leaves"):
        LocalConfig(every=2, fragments=3)
    with pytest.raises(ValueError, match="sync=diloco does not allow fused"):
        CommConfig(sync="diloco", fused=True)
    with pytest.raises(ValueError, match=r"does not allow local\.overlap"):
        CommConfig(sync="local-sgd", elastic=True, local=LocalConfig(overlap=2))
    with pytest.raises(ValueError, match=r"does not allow local\.start"):
        CommConfig(sync="diloco", elastic=True, local=LocalConfig(start=2))


def test_the_first_steps_need_equal_batches():
    local = ["comm.sync=diloco", "comm.local.start=5"]
    for uneven in ("data.last=keep", "data.on_bad=skip"):
        with pytest.raises(ConfigError, match=r"comm\.local\.start needs equally many samples"):
            resolve("digits", [*local, uneven])
        resolve("digits", ["comm.sync=diloco", uneven])
    assert resolve("digits", local).comm.local.start == 5


def test_eight_bits_go_with_local_steps_and_nothing_else_does():
    comm = resolve("digits", ["comm.sync=diloco", "comm.wire=int8", "comm.int8.block=64"]).comm
    assert comm.make_wire() == Int8(block=64)
    for options, words in (
        ({"sync": "gossip", "wire": "int8"}, "with sync=gossip use float16"),
        ({"sync": "diloco", "wire": "powersgd"}, "works only with sync=allreduce"),
        ({"sync": "diloco", "wire": "int8", "local": LocalConfig(partners="random")}, "partners=all"),
        ({"elastic": True, "wire": "int8"}, "does not work with elastic"),
    ):
        with pytest.raises(ValueError, match=words):
            CommConfig(**options)


@pytest.mark.parametrize(("sync", "wire"), [("local-sgd", None), ("diloco", "int8")])
def test_a_run_evaluates_the_mean_of_its_replicas(sync, wire, tmp_path):
    comm = CommConfig(sync=sync, local=LOCAL, wire=wire, int8=Int8(level="rank"))
    train_on_threads(replace(TINY, epochs=2, comm=comm), 2, tmp_path)
    found = rows(tmp_path, "evaluation")
    assert [row["epoch"] for row in found] == [1, 2]
    assert all(row["spread"] > 0 for row in found)
