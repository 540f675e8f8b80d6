/* A schedule under SimGrid's SMPI: every rank reads the messages and does its part of each step, as phalanx.comm.run does.
 *
 *   smpirun -np N -platform FILE -hostfile FILE ./plan_simgrid MESSAGES        each line of MESSAGES: step source target bytes
 *
 * Prints the simulated seconds of the slowest rank. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

struct message { int step, source, target, bytes; };

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);

  int count = 0, largest = 1;
  struct message m, *mine = NULL;
  FILE *file = fopen(argv[1], "r");
  while (fscanf(file, "%d %d %d %d", &m.step, &m.source, &m.target, &m.bytes) == 4)
    if (m.source == rank || m.target == rank) {
      mine = realloc(mine, (count + 1) * sizeof *mine);
      mine[count++] = m;
      if (m.bytes > largest) largest = m.bytes;
    }
  fclose(file);
  char *nothing = malloc(largest); /* contents do not matter: only times are simulated */
  MPI_Request *requests = malloc((count + 1) * sizeof *requests);

  MPI_Barrier(MPI_COMM_WORLD);
  double begun = MPI_Wtime();
  for (int first = 0, last; first < count; first = last) {
    int posted = 0;
    for (last = first; last < count && mine[last].step == mine[first].step; last++)
      if (mine[last].target == rank)
        MPI_Irecv(nothing, mine[last].bytes, MPI_BYTE, mine[last].source, 0, MPI_COMM_WORLD, &requests[posted++]);
    for (int i = first; i < last; i++)
      if (mine[i].source == rank)
        MPI_Isend(nothing, mine[i].bytes, MPI_BYTE, mine[i].target, 0, MPI_COMM_WORLD, &requests[posted++]);
    MPI_Waitall(posted, requests, MPI_STATUSES_IGNORE);
  }
  double took = MPI_Wtime() - begun, slowest;
  MPI_Reduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0) printf("%.12e\n", slowest);
  MPI_Finalize();
  return 0;
}
