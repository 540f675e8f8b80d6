"""Phalanx as a backend of torch.distributed: `init_process_group("phalanx")`.

registration    the name, and the function that torch calls for it
create          making a group
process_group   the collectives that torch calls: which run here and which go to gloo
forms           the argument forms that torch uses
engine          shared memory on one host, a schedule between hosts
lane            one order of operations, in the calling thread or in a thread of the group
work            the handle of an asynchronous call
transport       messages between hosts, on a gloo group
meeting         how the ranks of a group find each other, and which are missing after a failure
options         the algorithm, from `pg_options` or the environment
"""

from phalanx.backend.registration import Options, register

__all__ = ["Options", "register"]
