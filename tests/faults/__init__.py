"""Ranks that die or freeze, disks and stores that fail, bits that flip: stories across all rooms."""
