"""Whether replicas hold the same bytes."""
