"""Holdfast against its peers, on the same work, in one run.

`python -m benchmarks.bench` runs it.
Never part of the installed package, and nothing in `holdfast` imports it.
"""
