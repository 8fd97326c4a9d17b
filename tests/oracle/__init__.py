"""What a save writes, byte for byte, held against a record: for changes that must not change a byte on disk."""
