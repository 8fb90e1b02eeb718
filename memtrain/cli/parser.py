"""Command lines whose mistakes are errors like any other: one line, named, with where to look."""

import argparse
from typing import Any


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str) -> Any:
        """Refuse the arguments."""
        raise ValueError(f"{message}; see {self.prog} --help")
