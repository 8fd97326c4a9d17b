"""Checkpoints and runs as one HTML page, whole in itself. Never reads more than it shows, never changes anything."""
