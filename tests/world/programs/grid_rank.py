"""A rank of the grid where a launcher starts it: prints the cells that are wrong, one per line."""

from tests.world.grid import cells
from tests.world.grid_verbs import wrong_cells

import phalanx

if __name__ == "__main__":
    with phalanx.create_communicator(timeout=60) as comm:
        for cell in wrong_cells(comm, cells(comm.size)):
            print(cell)
