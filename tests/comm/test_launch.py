"""Rank, world and meeting point out of the environments that launchers leave; `discover` is a pure function."""

import pytest

from phalanx.comm.launch import (
    ALONE,
    DEFAULT_PORT,
    PLACES,
    Launch,
    LaunchError,
    check_own_devices,
    device_index,
    discover,
    exported_secret,
    first_host,
    place_among,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-010]",
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
}


def test_torchrun():
    elastic = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = {"rank": 3, "world": 8, "local_rank": 1, "local_world": 2, "address": "h0", "port": 29500}
    assert discover(TORCHRUN | elastic) == Launch(how="torchrun", **place, agent_store=True, attempt=2, job="x")
    assert discover(TORCHRUN) == Launch(how="environment", **place)
    assert not discover(TORCHRUN | elastic | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_by_hand_with_the_least():
    assert discover({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}).port == DEFAULT_PORT
    assert discover({"RANK": "0", "WORLD_SIZE": "1"}).world == 1  # alone needs no address


@pytest.mark.parametrize(("environ", "how"), [(OPEN_MPI, "mpirun (Open MPI)"), (MPICH, "mpirun (MPICH)")])
def test_mpirun(environ, how):
    assert discover(environ) == Launch(how=how, rank=3, world=8, local_rank=1, local_world=2, port=DEFAULT_PORT)
    told = discover(environ | {"MASTER_ADDR": "h0", "MASTER_PORT": "1234"})
    assert (told.address, told.port) == ("h0", 1234)


def test_mpich_that_tells_no_local_size_is_taken_for_one_host():
    launch = discover({"PMI_RANK": "1", "PMI_SIZE": "4"})
    assert (launch.local_rank, launch.local_world) == (0, 4)


def test_srun():
    launch = discover(SRUN)
    assert (launch.how, launch.rank, launch.world, launch.local_rank, launch.address) == ("srun", 3, 8, 1, "gpu007")
    assert 20000 <= launch.port < 30000
    assert discover(SRUN | {"SLURM_PROCID": "0"}).port == launch.port  # the same on all ranks
    assert discover(SRUN | {"SLURM_STEP_ID": "1"}).port != launch.port  # another on another step
    assert discover(SRUN | {"MASTER_ADDR": "h", "MASTER_PORT": "99"}).address == "h"


def test_a_batch_script_without_srun_is_alone():
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_NODELIST": "a,b"}) == ALONE


def test_nothing_is_alone():
    assert discover({}) == ALONE == Launch(how="alone", rank=0, world=1)
    assert discover({"MASTER_ADDR": "h", "MASTER_PORT": "1", "RANK": "0"}) == ALONE


def test_the_inner_launcher_goes_before_the_outer():
    assert discover(SRUN | TORCHRUN).how == "environment"
    assert discover(SRUN | OPEN_MPI).how == "mpirun (Open MPI)"
    assert discover(OPEN_MPI | TORCHRUN).how == "environment"
    assert discover(SRUN | MPICH).how == "srun"  # srun sets PMI_RANK itself


@pytest.mark.parametrize(
    ("environ", "fact"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "rank 2 of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "rank -1 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "of 0"),
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "RANK='one' is not a number"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT='' is not a number"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
    ],
)
def test_half_an_environment_is_an_error_with_the_facts(environ, fact):
    with pytest.raises(LaunchError, match=fact):
        discover(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[007-012,20],cpu1", "gpu007"),
        ("node1", "node1"),
        ("node-1,node-2", "node-1"),
        ("a[3,5-6]", "a3"),
        ("a[1-2]b", "a1b"),
        ("a[1-2]b,c", "a1b"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("h.example.org", "h.example.org"),
        ("", ""),
    ],
)
def test_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "one_host"),
    [
        (TORCHRUN, False),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, False),  # by hand, and nobody says how many are here
        (OPEN_MPI, False),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_ADDR": "h"}, False),  # an MPICH that tells no local size, on several hosts
        (SRUN, False),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, True),
        (SRUN | {"SLURM_STEP_NUM_NODES": "2"}, False),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu007"}, True),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu007,gpu008"}, False),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[007]"}, False),  # one, but no need to parse that
    ],
)
def test_whether_all_ranks_are_on_one_host(environ, one_host):
    assert discover(environ).one_host is one_host


def test_a_secret_is_long_enough_or_an_error_that_does_not_tell_it():
    assert exported_secret({}) is None
    assert exported_secret({"PHALANX_SECRET": "0123456789abcdef"}) == "0123456789abcdef"
    with pytest.raises(LaunchError, match="has 5 characters, fewer than 16") as caught:
        exported_secret({"PHALANX_SECRET": "hello"})
    assert "hello" not in str(caught.value)


# ---- the place on the host, which chooses the GPU ------------------------------------------------------------------------------

BY_HAND = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "h0"}


@pytest.mark.parametrize("names", PLACES, ids=lambda names: names.local_rank)
def test_without_local_rank_the_launcher_below_gives_it(names):
    """RANK and WORLD_SIZE alone used to mean local rank 0, so all ranks of a host shared GPU 0."""
    below = {names.rank: "3", names.world: "8", names.local_rank: "1"}
    below |= {names.local_world: "2"} if names.local_world else {}
    launch = discover(BY_HAND | below)
    assert (launch.local_rank, launch.placed) == (1, True)
    assert launch.local_world == (2 if names.local_world else 1)


@pytest.mark.parametrize("names", PLACES, ids=lambda names: names.local_rank)
def test_a_launcher_that_counts_other_processes_is_not_asked(names):
    """One process per host, which starts the ranks: all of them see its place."""
    for other in ({names.rank: "0", names.world: "8"}, {names.rank: "3", names.world: "4"}, {}):
        launch = discover(BY_HAND | {names.local_rank: "0"} | other)
        assert (launch.local_rank, launch.placed) == (0, False)


def test_local_rank_comes_before_the_launcher_below():
    launch = discover(BY_HAND | {"LOCAL_RANK": "1", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0"})
    assert (launch.local_rank, launch.placed) == (1, True)


def test_an_unknown_place_is_marked_so():
    assert not discover(BY_HAND).placed
    assert not discover({"PMI_RANK": "1", "PMI_SIZE": "4"}).placed
    assert discover({"RANK": "0", "WORLD_SIZE": "1"}).placed  # one rank has the first place
    assert all(discover(environ).placed for environ in ({}, TORCHRUN, OPEN_MPI, MPICH, SRUN))


@pytest.mark.parametrize(
    ("tasks", "node", "here"),
    [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("8", 0, 8), ("4(x2)", 2, 1), ("?", 0, 1)],
)
def test_srun_gives_the_tasks_of_this_node(tasks, node, here):
    assert discover(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}).local_world == here


def test_hosts_agree_on_the_place_of_every_rank():
    keys = ["a", "b", "a", "a", "b"]
    found = [place_among(Launch("environment", rank, 5, placed=False), keys) for rank in range(5)]
    assert [(one.local_rank, one.local_world, one.placed) for one in found] == [
        (0, 3, True), (0, 2, True), (1, 3, True), (2, 3, True), (1, 2, True),
    ]  # fmt: skip


def test_the_gpu_of_a_rank():
    for count in (2, 4, 8):
        assert [device_index(rank, count, count) for rank in range(count)] == list(range(count))
    assert [device_index(rank, 8, 1) for rank in range(8)] == [0] * 8  # the launcher shows each rank its own
    with pytest.raises(LaunchError, match=r"8 ranks on this host, but 4 GPUs: local rank 5 has none.*at most 4 ranks.*gloo"):
        device_index(5, 8, 4)
    with pytest.raises(LaunchError, match="6 ranks on this host"):  # a launcher that gave no local size
        device_index(5, 1, 4)
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES"):
        device_index(0, 1, 0)


def test_two_ranks_with_one_gpu_are_named():
    check_own_devices(["a/0", "a/1", "b/0", "b/1"])
    with pytest.raises(LaunchError, match="ranks 1, 3 all have GPU h/uuid-7, and NCCL takes one rank per GPU"):
        check_own_devices(["h/uuid-1", "h/uuid-7", "i/uuid-1", "h/uuid-7"])
    with pytest.raises(LaunchError, match="2 GPUs are shared in all"):
        check_own_devices(["a", "a", "b", "b"])
