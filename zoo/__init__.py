"""A zoo of objects with ``state_dict()`` and ``load_state_dict()``, and a judge: `python -m zoo`, or `make zoo`.

Every case trains, is saved, is loaded into a fresh object and goes on. It has to go on as after torch's own
``load_state_dict``, bit for bit, or be refused by name before anything changed.
"""
