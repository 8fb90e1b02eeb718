"""axolotl: a plugin that trains with a wrapped model and optimizer, and says so at the start."""

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

    axolotl's trainer is subclassed by `memtrain_trainer`. axolotl goes on without a plugin that
    cannot be imported: look for the line that this one logs.
    """

    memtrain_config: Any = None

    def register(self, cfg: dict[str, Any]) -> None:
        """Read, check and log the key `memtrain`.

        Args:
            cfg: axolotl's config, as written.

        Raises:
            ValueError: If the config is not valid, or for reinforcement learning, whose trainers
                axolotl makes otherwise.
        """
        self.memtrain_config = cfg.get("memtrain")
        if cfg.get("rl"):
            raise ValueError(f"rl={cfg['rl']!r} with memtrain; allowed: supervised training")
        config = load(self.memtrain_config)
        _LOG.warning("memtrain is on: memtrain=%r, weights=%s, gradients=%s",
                     self.memtrain_config, config.weights, config.gradients)  # fmt: skip

    def get_trainer_cls(self, cfg: Any) -> type:
        """Axolotl's trainer of language models, wrapped.

        Args:
            cfg: axolotl's config; not read.
        """
        from axolotl.core.trainers import AxolotlTrainer  # pyright: ignore[reportMissingImports]

        return memtrain_trainer(AxolotlTrainer, self.memtrain_config)
