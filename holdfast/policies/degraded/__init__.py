"""Saves that are committed although ranks were lost."""
