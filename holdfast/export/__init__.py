"""Checkpoints in the formats that others read: a file for each format, and how tensors are copied into it."""
