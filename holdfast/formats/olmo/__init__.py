"""OLMo and OLMo-core."""
