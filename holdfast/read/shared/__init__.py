"""One read for many ranks that want the same bytes."""
