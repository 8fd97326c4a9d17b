"""Stores: where a checkpoint may lie besides a local folder, and what is put around them.

`engine/storage.py` and the reader call these. Never knows what a checkpoint is: keys, bytes and listings alone.
"""
