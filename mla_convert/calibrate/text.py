"""Text for calibration and evaluation, and its cutting into contexts of tokens."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import LongTensor, Tensor

from mla_convert.errors import TextError
from mla_convert.text_ref import is_file_ref

logger = logging.getLogger(__name__)

BUILTIN_TEXT = "builtin:pydoc"
# A streamed dataset may have no end in sight; without a limit from the caller this much of it is read.
STREAMED_CHARS = 20_000_000
# Tokens discarded at the end of a tokenised prefix: merges there may change when the text goes on.
_UNSETTLED_TOKENS = 64
_DATASET_REF = re.compile(
    r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^@#]+))?(?:@(?P<split>[^#]+))?(?:#(?P<column>.+))?"
)


@dataclass(frozen=True)
class Text:
    """A text and what identifies it: ``digest`` is the SHA-256 of the UTF-8 bytes of ``text``, as used."""

    ref: str
    text: str
    digest: str


def read_text(ref: str, *, max_chars: int | None = None) -> Text:
    """Return the text that ``ref`` names, its first ``max_chars`` characters where given.

    Args:
        ref: the path of a UTF-8 file, ``builtin:pydoc`` (the language reference that ships with Python, which differs
            between Python versions: the digest tells), or a `datasets` ID as ``ID[:CONFIG][@SPLIT][#COLUMN]``, streamed
            (split ``train`` and column ``text`` unless stated; rows are joined by a blank line).
        max_chars: the limit; a dataset without one is read up to ``STREAMED_CHARS``.

    Raises:
        TextError: the file, dataset, split or column is not there, cannot be read, or is empty.
    """
    if ref.startswith("builtin:"):
        text = _read_builtin(ref)[:max_chars]
    elif is_file_ref(ref):
        text = _read_file(Path(ref), max_chars)
    else:
        text = _read_dataset(ref, max_chars)
    if not text.strip():
        raise TextError(f"the text {ref} is empty", "choose a text with something in it")
    return Text(ref, text, hashlib.sha256(text.encode()).hexdigest())


def windows(
    tokenizer: Any, text: str, *, context: int, max_tokens: int | None = None, seed: int | None = None
) -> LongTensor:
    """Return the text as disjoint contexts of token ids, [n context]; the tail that fills no context is left out.

    No special tokens are added. ``max_tokens`` bounds n·context. Without a seed the contexts are the text from its
    start, in order (evaluation), and no more of it is tokenised than needed; with one they are a seeded random sample
    of all its contexts, drawn without replacement (calibration).

    Raises:
        TextError: the text, or ``max_tokens``, is too short for one context.
    """
    if context < 2:
        raise TextError(f"a context of {context} tokens predicts nothing", "give a context of at least 2 tokens")
    if max_tokens is not None and max_tokens < context:
        raise TextError(
            f"{max_tokens} tokens do not fill one context of {context}", "raise the token limit or shorten the context"
        )
    wanted = None if max_tokens is None else max_tokens // context
    if seed is None and wanted is not None:
        ids = _first_tokens(tokenizer, text, wanted * context)
    else:
        ids = _tokenised(tokenizer, text)
    available = len(ids) // context
    if available == 0:
        raise TextError(
            f"the text is too short for one context of {context} tokens: it has {len(ids)}",
            "give a longer text or a shorter context (--context; in a recipe, calibration.context)",
        )
    contexts = torch.as_tensor(ids[: available * context], dtype=torch.long).view(available, context)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        contexts = contexts[torch.randperm(available, generator=generator)]
    return contexts[:wanted].contiguous()  # pyright: ignore[reportReturnType]


def check_distinct(texts: Sequence[Text]) -> None:
    """Check that no text is there twice: it would count double, and what is held out of it would not be.

    Raises:
        TextError: one is.
    """
    seen: dict[str, str] = {}
    for text in texts:
        if text.digest in seen:
            raise TextError(f"{seen[text.digest]} and {text.ref} are the same text", "name every text once")
        seen[text.digest] = text.ref


def joint_digest(texts: Sequence[Text]) -> str:
    """Return one digest for several texts; a single text's is its own."""
    if len(texts) == 1:
        return texts[0].digest
    return hashlib.sha256(" ".join(text.digest for text in texts).encode()).hexdigest()


def mixed_windows(tokenizer: Any, texts: Sequence[Text], *, context: int, max_tokens: int, seed: int) -> LongTensor:
    """Return a seeded sample of contexts of several texts, which take turns: [n context], n·context <= ``max_tokens``.

    Every text gives an equal share of ``max_tokens``, or all it has. With one text this is `windows` with a seed.

    Raises:
        TextError: a text is too short for one context, ``max_tokens`` for one of each, or a text is there twice.
    """
    check_distinct(texts)
    if max_tokens < len(texts) * context:
        raise TextError(
            f"{max_tokens} tokens do not fill one context of {context} from each of {len(texts)} texts",
            "raise the token limit, shorten the context or give fewer texts",
        )
    share = max_tokens // len(texts)
    rows = [windows(tokenizer, text.text, context=context, max_tokens=share, seed=seed).unbind() for text in texts]
    turns = [row for turn in zip_longest(*rows) for row in turn if row is not None]
    return cast("LongTensor", torch.stack(turns))


def _read_builtin(ref: str) -> str:
    if ref != BUILTIN_TEXT:
        raise TextError(f"there is no built-in text {ref!r}", f"use {BUILTIN_TEXT}, a file or a datasets ID")
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise TextError(
            "this Python was built without its language reference (pydoc_data)", "give a text file"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def _read_file(path: Path, max_chars: int | None) -> str:
    path = path.expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            # Not what is asked for at any rate: reading reserves as much, and there may be far less.
            return file.read(-1 if max_chars is None else min(max_chars, path.stat().st_size))
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text ({error.reason})", "convert the file to UTF-8") from error
    except OSError as error:
        raise TextError(f"cannot read the text {path}: {error.strerror}", "give a readable text file") from error


def _read_dataset(ref: str, max_chars: int | None) -> str:
    match = _DATASET_REF.fullmatch(ref)
    if match is None:
        raise TextError(
            f"{ref!r} is neither a file nor a datasets ID", "give a file that exists, or ID[:CONFIG][@SPLIT][#COLUMN]"
        )
    name, config = match["id"], match["config"]
    split, column = match["split"] or "train", match["column"] or "text"
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise TextError(
            f"there is no file {ref!r}, and reading it as a dataset needs the datasets package",
            "give a file that exists, or run: pip install datasets",
        ) from error
    if max_chars is None:
        logger.warning("reading at most %d characters of the dataset %s", STREAMED_CHARS, ref)
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        return _join_rows(rows, column, STREAMED_CHARS if max_chars is None else max_chars)
    except KeyError as error:
        raise TextError(
            f"the dataset {name} has no column {column!r}", f"name a column of text: {ref.split('#')[0]}#COLUMN"
        ) from error
    except Exception as error:  # every HTTP and file-format library that datasets uses raises errors of its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TextError(
            f"there is no file {ref!r}, and it cannot be read as a dataset: {reason}",
            "check the name, the config, the split and the network, or give a text file",
        ) from error


def _join_rows(rows: Iterable[dict[str, Any]], column: str, max_chars: int) -> str:
    parts: list[str] = []
    length = 0
    for row in rows:
        parts.append(str(row[column]))
        length += len(parts[-1]) + 2
        if length >= max_chars:
            break
    return "\n\n".join(parts)[:max_chars]


def _first_tokens(tokenizer: Any, text: str, count: int) -> list[int]:
    """Return the text's first ``count`` tokens (fewer if it ends), tokenising prefixes of growing length."""
    chars = 6 * count + 1024
    while chars < len(text):
        ids = _tokenise(tokenizer, text[:chars])
        if len(ids) >= count + _UNSETTLED_TOKENS:
            return ids[:count]
        chars *= 2
    return _tokenise(tokenizer, text)[:count]


@functools.lru_cache(maxsize=4)
def _tokenised(tokenizer: Any, text: str) -> Int[Tensor, " n"]:
    """All of a text's tokens, kept for the next stage that draws contexts of it: a long one takes seconds."""
    return torch.tensor(_tokenise(tokenizer, text), dtype=torch.int32)


def _tokenise(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: a text longer than the model's context is what this module is for, not worth a warning.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def uniform_windows(vocabulary: int, *, count: int, context: int, seed: int) -> LongTensor:
    """Return `count` contexts of token ids drawn uniformly from the vocabulary, [count context]."""
    generator = torch.Generator().manual_seed(seed)
    return cast("LongTensor", torch.randint(vocabulary, (count, context), generator=generator))
