"""Maps between layouts of one model: other names, other shapes, the same elements; see docs/remap.md."""
