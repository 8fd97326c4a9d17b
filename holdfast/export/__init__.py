"""Checkpoints in the form that others read: one file a format, from a selection of tensors to the files of a target.

`holdfast.convert` asks here. Never holds a whole state: tensors go through windows, and headers are
written last.
"""
