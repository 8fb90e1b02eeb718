"""memtrain makes PyTorch training fit: one line, a fraction of the bytes, the same result."""

from memtrain.api import (
    adapter,
    load_state_dict,
    plan_of,
    precision_state,
    state_dict,
    unwrap,
    wrap,
)
from memtrain.audit import audit
from memtrain.config import Config
from memtrain.parameters import fp32_state_dict, load_fp32_state_dict
from memtrain.peak.largest import largest
from memtrain.plan import Plan
from memtrain.planner import make_plan
from memtrain.quality import gradient_quality

__all__ = [
    "Config",
    "Plan",
    "adapter",
    "audit",
    "fp32_state_dict",
    "gradient_quality",
    "largest",
    "load_fp32_state_dict",
    "load_state_dict",
    "make_plan",
    "plan_of",
    "precision_state",
    "state_dict",
    "unwrap",
    "wrap",
]
__version__ = "0.1.0"
