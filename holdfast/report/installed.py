"""The listeners that every program has: progress bars, and the timeline that the environment asks for.

`events` imports this module with the first event of a process; importing it installs them.
"""

from holdfast.events import install
from holdfast.report.progress import Bars
from holdfast.report.timeline import from_environment

install(Bars())
from_environment()
