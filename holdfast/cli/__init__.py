"""The command `holdfast`: a file for each word, each a thin layer over the function of the same name.

Run by the console script and by ``python -m holdfast``. Never imported by the library: it brings typer with it.
"""
