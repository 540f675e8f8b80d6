"""`phalanx selftest`: checks that a user runs on their own machines, CPUs or GPUs, in a minute.

all_checks    the whole selftest; facts.py: what each rank reports about itself
result        Check and Result: values, and how results of several ranks are combined
runner        one check after another, within the time limit; all ranks agree on each result
placement     where the ranks are, and whether that can work
correctness   every verb against exact answers; cases.py has the data
ordering      calls in flight while tensors change, are dropped or arrive late
training      ten steps against DDP; reference.py has the plain training
speed         all-reduce, a training step, a recommendation; slow_ranks.py: ranks that are slow
failure       a separate job in which a rank is killed; victim.py is its program
render        the lines and the file
"""
