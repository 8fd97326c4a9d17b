"""Formats of checkpoints: holdfast's own, and a folder or file for each format of other libraries.

`checkpoint.py` opens paths through `own` and `detect`. Never executes anything that a file names, and never reads the
bytes of a tensor to list it.
"""
