"""Settings for the whole test session: examples are never timed, and torch keeps to one thread."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")
torch.set_num_threads(1)
