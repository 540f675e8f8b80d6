"""Phalanx as a backend of torch.distributed: `init_process_group("phalanx")`.

registration    the name, and what torch calls when you use it
create          how a group is made
process_group   the collectives that torch calls: which run here, and which fall through to gloo
forms           the forms in which torch calls it
engine          shared memory on one host, a schedule between hosts
lane            one order of operations, in the calling thread or in a thread of the group
work            what an asynchronous call returns
transport       messages between hosts, on a gloo group
meeting         how the ranks of a group find each other, and who is missing after a failure
options         the algorithm, from `pg_options` or the environment
"""

from phalanx.backend.registration import Options, register

__all__ = ["Options", "register"]
