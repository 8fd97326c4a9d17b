"""Imported last by the process that ranks are forked from: what was imported before is never collected.

The garbage collector of each rank looks at a million fewer objects, and writes to none of their pages.
"""

import gc

gc.collect()
gc.freeze()
