"""From a checkpoint's files to memory: byte ranges, sources, checked blocks."""
