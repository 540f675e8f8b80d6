"""Training as a whole: checkpoints and evaluation over all ranks. The only room, with the command line, that knows all others."""
