"""What the bytes of a checkpoint mean: names, boxes, data files, blocks, manifest.

Used by every floor above. Pure: no I/O, no process group, no clock.
"""
