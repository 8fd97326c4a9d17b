"""What was run on this code, when, and with what result: `python -m evidence`.

It records long runs in `evidence/rows` and writes the table in docs/trust.md. Never part of the installed package.
"""
