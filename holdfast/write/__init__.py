"""From memory to files: data files in windows, summed, by threads or a process of their own."""
