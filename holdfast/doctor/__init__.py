"""What is wrong with a machine, a folder, a store or a checkpoint, and how to mend it."""
