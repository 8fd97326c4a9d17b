"""A checkpoint compared with the state that it is loaded into."""
