"""torch.distributed.checkpoint."""
