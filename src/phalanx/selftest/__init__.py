"""`phalanx selftest`: checks that a user runs on their own machines, CPUs or GPUs, in a minute.

all_checks    the whole of it; facts.py: what each rank knows about itself
result        Check and Result: values, and what several ranks' results make together
runner        one check after another, in the time that there is; all ranks agree on each result
placement     where the ranks are, and whether that can work
correctness   every verb against exact answers; cases.py has the data
ordering      calls under way while tensors change, leave and arrive late
training      ten steps against DDP; reference.py has the plain training
speed         all-reduce, a training step, a recommendation; slow_ranks.py: ranks that are slow
failure       a job of its own in which a rank is killed; victim.py is its program
render        the lines and the file
"""
