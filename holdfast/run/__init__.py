"""A run and its steps: when to save, what to keep, the journal, tiers."""
