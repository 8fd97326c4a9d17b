"""Importing this takes what was imported before out of the garbage collector's sight.

The processes that ranks and commands are forked from import it last. Their children neither look through those objects
at every collection, nor write to their pages, which they share.
"""

import gc

gc.collect()
gc.freeze()
