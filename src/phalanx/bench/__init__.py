"""The benchmarks of `phalanx bench`: contenders side by side, taking turns in one run.

Start with config.py, which describes each benchmark as a value. ranks.py starts the processes, rank.py is one of them, and
allreduce.py, train.py and gossip.py measure.
"""
