"""A digest of the C++ sources, to check that the library was built from them."""

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def digest() -> str:
    """Return 16 hexadecimal digits of the C++ sources' names and contents; empty if none."""
    paths = sorted(path for kind in ("*.cpp", "*.h") for path in FOLDER.rglob(kind))
    found = hashlib.sha256()
    for path in paths:
        found.update(path.relative_to(FOLDER).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16] if paths else ""
