"""The recipe `cifar10` with GossipGraD. Replicas mix with one partner per step, and are averaged before evaluations."""

from dataclasses import replace

from phalanx.recipes.cifar10 import config as all_reduce
from phalanx.train.update import CommConfig

config = replace(all_reduce, name="cifar10-gossip", comm=CommConfig(sync="gossip"))
