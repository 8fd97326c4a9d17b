"""Words between ranks: exchanges and verdicts over the store of a process group, heartbeats, notices."""
