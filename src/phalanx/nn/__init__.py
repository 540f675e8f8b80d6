"""Networks, losses, and batch norms and initialisation across ranks."""
