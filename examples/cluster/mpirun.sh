#!/bin/bash
# bash examples/cluster/mpirun.sh
# Open MPI starts the processes that the hostfile lists; MPI itself carries nothing. mpirun exports no address: rank 0's is given here.
# With mpi4py installed (`pip install phalanx[mpi]`) the two -x MASTER_ lines may go.
set -euo pipefail
here=$(dirname "$0")
first=$(awk '!/^#/ { print $1; exit }' "$here/hostfile")
export PHALANX_SECRET=$(openssl rand -hex 32)  # ranks sign what they tell each other

exec mpirun --hostfile "$here/hostfile" --map-by node --bind-to none \
    -x MASTER_ADDR="$first" -x MASTER_PORT=29500 -x OMP_NUM_THREADS=4 -x PHALANX_SECRET \
    python examples/imagenet.py --data imagefolder:/data/imagenet --epochs 90 --batch 1024 --pixels 224 --out /shared/run
