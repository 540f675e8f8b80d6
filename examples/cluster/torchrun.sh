#!/bin/bash
# On every host: bash examples/cluster/torchrun.sh
# The hosts meet at host0, in any order; each starts 8 ranks.
set -euo pipefail
export OMP_NUM_THREADS=4

exec torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id imagenet --rdzv-endpoint host0:29400 \
    examples/imagenet.py --data imagefolder:/data/imagenet --epochs 90 --batch 1024 --pixels 224 --out /shared/run
