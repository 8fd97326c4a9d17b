"""Questions about checkpoints that need no training: what is there, how large, how different. Never changes one."""
