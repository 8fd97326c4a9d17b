"""torchsnapshot."""
