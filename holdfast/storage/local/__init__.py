"""Files on a local disk."""
