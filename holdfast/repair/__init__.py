"""Checkpoints that are there: verified, repaired, rescued, reduced, signed."""
