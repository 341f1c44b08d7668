"""The command line that serves a folder with an engine."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mla_convert.errors import FormatError, SourceError, UsageError
from mla_convert.record import RECORD_NAME

log = logging.getLogger(__name__)

ServingEngine = Literal["vllm", "transformers", "llamacpp"]

_PROGRAMS = {"vllm": "vllm", "transformers": "transformers", "llamacpp": "llama-server"}
_INSTALL = {
    "vllm": "pip install vllm, in the environment that mla-convert is in or one that comes first on PATH",
    "transformers": "pip install 'transformers[serving]'",
    "llamacpp": "install llama.cpp, whose llama-server has to be on PATH",
}


@dataclass(frozen=True)
class Served:
    """What is in a folder, as far as serving it goes.

    Attributes:
        folder: where it lies.
        kind: ``native`` (what convert and heal write), ``stock`` (an architecture that engines have), ``custom`` (this
            project's class in DeepSeek's shape) or ``gguf``.
        file: the GGUF file, where it is one.
    """

    folder: Path
    kind: Literal["native", "stock", "custom", "gguf"]
    file: Path | None = None


def look_at(folder: Path) -> Served:
    """Return what is to be served. Of a rejected export a warning is logged.

    Raises:
        SourceError: there is no model in it.
    """
    _warn_of_rejected(folder)
    config = folder / "config.json"
    if config.is_file():
        fields = _read(config)
        if fields.get("model_type") == "mla_convert":
            return Served(folder, "native")
        return Served(folder, "custom" if "auto_map" in fields else "stock")
    files = [folder] if folder.suffix == ".gguf" and folder.is_file() else sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return Served(folder, "gguf", files[0])
    if len(files) > 1:
        raise SourceError(f"{folder} holds {len(files)} GGUF files", "give the path of one of them")
    raise SourceError(f"{folder} holds no model", "name a folder that convert, heal or export wrote")


def suited(served: Served) -> tuple[ServingEngine, ...]:
    """Return the engines that can serve it, the best first."""
    match served.kind:
        case "gguf":
            return ("llamacpp",)
        case "native":
            return ("transformers",)
        case _:
            return ("vllm", "transformers")


def serve_command(
    served: Served,
    engine: ServingEngine | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the command that serves the folder, with the engine named or the best one installed.

    Args:
        dtype: what to compute in; None for what the weights are stored in.
        extra: passed on as they are.

    Raises:
        FormatError: the engine cannot serve what the folder holds.
        UsageError: the engine is not installed, or takes no dtype.
    """
    able = suited(served)
    if engine is not None and engine not in able:
        raise FormatError(
            f"{engine} cannot serve {served.folder}, which is of the {served.kind} form",
            f"--engine {able[0]}"
            if served.kind == "gguf"
            else f"mla-convert export {served.folder} OUT --target {'gguf' if engine == 'llamacpp' else engine}",
        )
    if dtype is not None and served.kind == "gguf":
        raise UsageError("llama.cpp computes in the dtypes that a GGUF file holds", "leave --dtype out of serve")
    wanted: tuple[ServingEngine, ...] = able if engine is None else (engine,)
    chosen: ServingEngine | None = next((one for one in wanted if installed(one)), None)
    if chosen is None:
        raise UsageError(f"{' and '.join(wanted)} cannot be started here: not installed", _INSTALL[wanted[0]])
    return [*_command(chosen, served, host, port, dtype), *extra]


def installed(engine: ServingEngine) -> bool:
    """Whether the engine's program is on PATH; transformers' server needs two packages more."""
    if shutil.which(_PROGRAMS[engine]) is None:
        return False
    return engine != "transformers" or all(find_spec(name) is not None for name in ("fastapi", "uvicorn"))


def _command(engine: ServingEngine, served: Served, host: str, port: int, dtype: str | None) -> list[str]:
    place = ["--host", host, "--port", str(port)]
    if engine == "llamacpp":
        return ["llama-server", "-m", str(served.file), *place]
    arguments = [str(served.folder), *place, *(["--dtype", dtype] if dtype else [])]
    if engine == "transformers":
        return ["transformers", "serve", *arguments, *([] if served.kind == "stock" else ["--trust-remote-code"])]
    # In this environment vLLM has the plugin, which knows the class; elsewhere the folder's own code is run.
    remote = served.kind == "custom" and find_spec("vllm") is None
    custom = ["--model-impl", "transformers", "--trust-remote-code"] if remote else []
    return ["vllm", "serve", *arguments, *custom]


def _warn_of_rejected(folder: Path) -> None:
    """Log a warning where the folder's record says that its verification failed."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        rejected = record["export"]["verification"]["passed"] is False
    except (OSError, ValueError, LookupError, TypeError):
        return  # it has no such record: nothing is known
    if rejected:
        log.warning("%s was rejected when it was exported: it does not answer as the converted model does", folder)


def _read(config: Path) -> dict[str, Any]:
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{config} is not readable JSON: {error}", "write the folder again") from error
    if not isinstance(fields, dict):
        raise SourceError(f"{config} is not a model config", "write the folder again")
    return fields
