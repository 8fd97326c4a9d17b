"""Formats of checkpoints: holdfast's own, and a folder or file for each format of other libraries."""
