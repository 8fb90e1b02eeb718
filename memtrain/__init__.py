"""memtrain trains PyTorch models in less memory: `memtrain.wrap(model, optimizer, preset)`."""

from sys import modules
from types import ModuleType

from memtrain.api import (
    adapter,
    load_state_dict,
    plan_of,
    precision_state,
    state_dict,
    unwrap,
    wrap,
)
from memtrain.audit.peak.estimate import estimate
from memtrain.audit.peak.largest import largest
from memtrain.audit.report import audit
from memtrain.config.sources import Config
from memtrain.environment import collect_env
from memtrain.plan.plan import Plan
from memtrain.planner import make_plan
from memtrain.verification import verify
from memtrain.wrapped import fp32_state_dict, load_fp32_state_dict

__all__ = [
    "Config",
    "Plan",
    "adapter",
    "audit",
    "collect_env",
    "estimate",
    "fp32_state_dict",
    "largest",
    "load_fp32_state_dict",
    "load_state_dict",
    "make_plan",
    "plan_of",
    "precision_state",
    "state_dict",
    "unwrap",
    "verify",
    "wrap",
]
# The function `audit` hides the package with the same name. The function gets the package's modules
# as attributes, so that `import memtrain.audit.peak.predict as predict` works.
vars(audit).update(
    {k: v for k, v in vars(modules["memtrain.audit"]).items() if isinstance(v, ModuleType)}
)
__version__ = "0.1.0"
