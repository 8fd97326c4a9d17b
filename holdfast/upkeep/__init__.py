"""What people do by hand to the checkpoints of a run: what may go, what dead saves left, what a disk can do."""
