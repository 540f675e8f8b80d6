"""The native core in csrc/: shared-memory operations of the ranks of a host. `comm` uses it for bytes, `optim` for updates."""
