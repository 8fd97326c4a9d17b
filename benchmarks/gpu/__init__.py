"""What one GPU can tell of holdfast in nine minutes, without a network: `make gpu`.

`run` runs the parts, each in a process of its own: tests of `tests/gpu`, and what is measured here. `page` makes a page
of what they found. Never changes a setting of the device, and leaves nothing on it or on the disk.
"""
