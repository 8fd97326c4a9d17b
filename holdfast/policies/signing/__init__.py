"""Signatures of checkpoints."""
