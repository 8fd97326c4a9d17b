"""hfai.checkpoint."""
