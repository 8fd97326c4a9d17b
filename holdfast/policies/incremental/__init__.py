"""Saves that cite what an earlier checkpoint holds already."""
