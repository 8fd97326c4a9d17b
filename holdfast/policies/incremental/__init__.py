"""Saves that reuse what an earlier checkpoint holds already."""
