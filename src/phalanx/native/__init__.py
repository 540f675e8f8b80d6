"""The native core in csrc/: what ranks of one host do in shared memory. `comm` uses it for bytes, `optim` for updates."""
