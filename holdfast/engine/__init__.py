"""The moving parts: ranks, storage, state, plan, stage, write, read.

Called by the three stories (save, load, manager). Each stage runs once and never calls back up.
"""
