"""Lightning, the model compiled in `configure_model`: `python examples/lightning_compile.py`."""

from functools import partial

from lightning_fit import Module, run
from tiny import compiled_bytes, report


class Compiled(Module):
    """Its model runs in graphs of inductor's."""

    def configure_model(self):
        """Lightning calls it in front of `configure_optimizers`."""
        self.model.compile()


if __name__ == "__main__":
    report(2, ["lightning"], partial(run, cls=Compiled), saved=compiled_bytes)
