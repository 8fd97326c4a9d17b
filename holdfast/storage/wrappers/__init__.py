"""What is put around a store: deadlines, further attempts, caches, limits."""
