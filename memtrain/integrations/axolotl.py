"""axolotl: a plugin that trains with a wrapped model and optimizer."""

import logging
from typing import Any

from memtrain.config.sources import load
from memtrain.integrations.transformers import memtrain_trainer

try:
    from axolotl.integrations.base import (  # pyright: ignore[reportMissingImports]
        BasePlugin as _BasePlugin,
    )
except ImportError:  # nobody but axolotl makes a plugin
    _BasePlugin: Any = object

_LOG = logging.getLogger(__name__)


class MemtrainPlugin(_BasePlugin):
    """`plugins: [memtrain.integrations.axolotl.MemtrainPlugin]` and `memtrain: balanced`.

    The plugin applies `memtrain_trainer` to axolotl's trainer. axolotl ignores a plugin that cannot
    be imported: check for the line that this plugin logs.
    """

    memtrain_config: Any = None

    def register(self, cfg: dict[str, Any]) -> None:
        """Read, check and log the key `memtrain` of axolotl's config.

        Raises:
            ValueError: If the config is not valid, or for reinforcement learning, which has other
                trainers.
        """
        self.memtrain_config = cfg.get("memtrain")
        if cfg.get("rl"):
            raise ValueError(f"rl={cfg['rl']!r} with memtrain; allowed: supervised training")
        config = load(self.memtrain_config)
        _LOG.warning("memtrain is on: memtrain=%r, weights=%s, gradients=%s",
                     self.memtrain_config, config.weights, config.gradients)  # fmt: skip

    def get_trainer_cls(self, cfg: Any) -> type:
        """Return axolotl's trainer of language models, wrapped."""
        from axolotl.core.trainers import AxolotlTrainer  # pyright: ignore[reportMissingImports]

        return memtrain_trainer(AxolotlTrainer, self.memtrain_config)
