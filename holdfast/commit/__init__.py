"""What ranks agree on before a save, and the manifest that makes it a checkpoint."""
