"""The interpreter that an engine is asked in."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def interpreter(python: Path | None) -> str:
    """Return the interpreter named, by default this one, so that it starts whatever folder it is started from.

    Looked for as a shell does: a bare name on PATH. A link stays one, since an environment's interpreter is a link to
    one outside it. What is not there is returned as it is.
    """
    if python is None:
        return sys.executable
    found = shutil.which(python)
    return str(python) if found is None else str(Path(found).absolute())
