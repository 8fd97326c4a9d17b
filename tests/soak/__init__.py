"""The soak: random training runs on real processes, with every fault at random moments; see docs/trust.md."""
