"""What large batches need of a network: models, and later losses, batch norms and initialisation across ranks."""
