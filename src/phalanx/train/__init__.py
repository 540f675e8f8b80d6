"""Training: configuration, loop, checkpoints and evaluation. Only this room and the command line may import all others."""
