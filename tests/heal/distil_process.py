"""Distils the tests' pair in a process of its own: ``python -m tests.heal.distil_process FOLDER SETTINGS [STOP]``.

With STOP the process kills itself, as kill -9 does, once that many steps are made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors.torch import save_file

from mla_convert.heal.checkpoint import Checkpoints
from mla_convert.heal.distil import DistilSettings, distil
from tests.heal.pair import healing_text_of, student_and_teacher

DROPOUT = "dropout"


def run(folder: Path, options: dict[str, Any], stop: int | None = None) -> None:
    """Write the curve, the weights and the number of processes into the folder, and keep checkpoints there.

    ``options`` are `DistilSettings`, and the student's dropout.
    """
    settings = DistilSettings(**{name: value for name, value in options.items() if name != DROPOUT})
    student, teacher = student_and_teacher()
    student.config.attention_dropout = options.get(DROPOUT, 0.0)

    def progress(stage: str, done: int, total: int) -> None:
        if done == stop:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = Checkpoints(folder / "checkpoints", {"settings": json.dumps(asdict(settings))})
    result = distil(student, teacher, healing_text_of(), settings, checkpoints, progress)
    if PartialState().is_main_process:
        (folder / "curve.json").write_text(json.dumps([asdict(point) for point in result.curve]))
        (folder / "processes").write_text(str(PartialState().num_processes))
        save_file(dict(result.weights), folder / "weights.safetensors")


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
