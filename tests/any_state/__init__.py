"""Random states on random meshes, loaded on others: `python -m tests.any_state --minutes 60 --seed 7`.

`recipe` draws a state and two meshes from a number, `layouts` builds it there, `trial` saves, loads and compares.
"""
