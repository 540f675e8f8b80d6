"""Rank, world and meeting point out of the environments that launchers leave; `discover` is a pure function."""

import pytest

from phalanx.comm.launch import ALONE, DEFAULT_PORT, Launch, LaunchError, discover, exported_secret, first_host

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
