"""A tokenizer as llama.cpp reads it from a GGUF file: only kinds that it splits as ``tokenizer.json`` does.

llama.cpp has the pre-tokenizers (the pattern that cuts a text into words) built in, under names. A name is chosen by
the pattern itself; one that is not known is refused, since llama.cpp would go on with a default and answer worse
without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from mla_convert.errors import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REMEDY = "--target transformers, which uses tokenizer.json itself"

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"

# What is split before the bytes are mapped -> llama.cpp's name. GPT-2's pattern is the one that ByteLevel has itself.
_PRE_TOKENIZERS: Mapping[tuple[str, ...], str] = {
    ("gpt2",): "gpt-2",
    ("digits", "gpt2"): "smollm",
    (_SUFFIXES + _WORDS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_SUFFIXES + _WORDS + r"\p{N}" + _REST,): "qwen2",
}

_SPACE = "▁"


class TokenKind(IntEnum):
    """llama.cpp's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GGUFTokenizer:
    """What a GGUF file says of its tokenizer, under ``tokenizer.ggml.``.

    Attributes:
        model: ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece BPE).
        pre: llama.cpp's name of the pre-tokenizer.
        tokens, kinds: one for each row of the embedding.
        scores: for ``llama``, higher is merged first.
        merges: for ``gpt2``, first is merged first.
        ids: ``bos``, ``eos``, ``unk``, ``pad`` where there is one.
        add_bos, add_eos: whether a text gets them.
        add_space: whether a text gets a space in front.
        chat_template: Jinja, or None.
        notes: where llama.cpp is known to differ.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    kinds: tuple[TokenKind, ...]
    ids: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    add_space: bool = False
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    chat_template: str | None = None
    notes: tuple[str, ...] = field(default=())


def gguf_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> GGUFTokenizer:
    """Return what a GGUF file has to say of `tokenizer`, for an embedding of `vocab_size` rows.

    Raises:
        FormatError: it is not a BPE tokenizer of a kind that llama.cpp knows, by name of what it does not know.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise FormatError("the model has no tokenizer.json", _REMEDY)
    state = json.loads(backend.to_str())
    if (kind := state["model"].get("type")) != "BPE":
        raise FormatError(f"a tokenizer of type {kind} has no counterpart in llama.cpp that is known here", _REMEDY)
    if max(backend.get_vocab().values()) >= vocab_size:
        raise FormatError(f"the tokenizer has more tokens than the embedding has rows, {vocab_size}", _REMEDY)
    tokens, kinds = _tokens(state, vocab_size)
    ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk", "pad")}
    if ids["eos"] is None:
        raise FormatError(
            "the tokenizer names no token that ends a text, and llama.cpp would take its default", _REMEDY
        )
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    front, back = _framing(list(bare), list(framed))
    if front not in ([], [ids["bos"]]) or back not in ([], [ids["eos"]]):
        raise FormatError(f"the tokenizer puts tokens {front} before and {back} after a text", _REMEDY)
    template = getattr(tokenizer, "chat_template", None)
    common: dict[str, Any] = {
        "ids": {name: value for name, value in ids.items() if value is not None},
        "add_bos": bool(front),
        "add_eos": bool(back),
        "chat_template": template.get("default") if isinstance(template, dict) else template,
    }
    build = _sentencepiece if state["model"].get("byte_fallback") else _byte_level
    return build(state, tokens, kinds, common)


def _tokens(state: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[TokenKind]]:
    """Every row's token and kind; rows without a token get one that no text contains."""
    tokens = [f"[PAD{row}]" for row in range(vocab_size)]
    kinds = [TokenKind.UNUSED] * vocab_size
    for token, row in state["model"]["vocab"].items():
        tokens[row], kinds[row] = token, TokenKind.NORMAL
    for added in state["added_tokens"]:
        kind = TokenKind.CONTROL if added["special"] else TokenKind.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    return tokens, kinds


def _framing(bare: Sequence[int], framed: Sequence[int]) -> tuple[list[int], list[int]]:
    for start in range(len(framed) - len(bare) + 1):
        if list(framed[start : start + len(bare)]) == list(bare):
            return list(framed[:start]), list(framed[start + len(bare) :])
    raise FormatError("the tokenizer changes a text when it adds special tokens", _REMEDY)


def _byte_level(
    state: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[TokenKind], common: Mapping[str, Any]
) -> GGUFTokenizer:
    steps = _sequence(state["pre_tokenizer"], "pretokenizers")
    name = _PRE_TOKENIZERS.get(tuple(split for step in steps if (split := _split(step)) is not None))
    if name is None or not steps or steps[-1]["type"] != "ByteLevel":
        raise FormatError(
            f"llama.cpp has no pre-tokenizer that is known to split as this model's: {_shown(state['pre_tokenizer'])}",
            _REMEDY,
        )
    if steps[-1]["add_prefix_space"]:
        raise FormatError("llama.cpp puts no space before the text for byte-level BPE, this tokenizer does", _REMEDY)
    notes = ()
    normalizers = _sequence(state["normalizer"], "normalizers")
    if [step["type"] for step in normalizers] == ["NFC"]:
        notes = (
            "llama.cpp does not compose characters (NFC) as the tokenizer does: text that is composed is the same.",
        )
    elif normalizers:
        raise FormatError(f"llama.cpp does not normalise text as this model: {_shown(state['normalizer'])}", _REMEDY)
    if bool(state["model"].get("ignore_merges")) != (name == "llama-bpe"):
        raise FormatError(f"llama.cpp's {name} has another ignore_merges than this tokenizer", _REMEDY)
    merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"])
    return GGUFTokenizer("gpt2", name, tuple(tokens), tuple(kinds), merges=merges, notes=notes, **common)


def _split(step: Mapping[str, Any]) -> str | None:
    """What a step splits by; None where it splits nothing."""
    match step["type"]:
        case "Digits" if step["individual_digits"]:
            return "digits"
        case "ByteLevel":
            return "gpt2" if step.get("use_regex", True) else None
        case "Split" if step["behavior"] == "Isolated" and not step["invert"]:
            return str(step["pattern"].get("Regex"))
    return f"unknown {step['type']}"


def _sentencepiece(
    state: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[TokenKind], common: Mapping[str, Any]
) -> GGUFTokenizer:
    """Scores come from the order of merges: llama.cpp merges the pair whose piece has the highest score."""
    add_space, notes = _spaces(state)
    ranks: dict[str, int] = {}
    last = ""
    for merge in state["model"]["merges"]:
        piece = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        if piece in ranks and piece != last:
            raise FormatError(f"the merges that make the piece {piece!r} are not of one rank", _REMEDY)
        ranks.setdefault(piece, len(ranks))
        last = piece
    kinds = list(kinds)
    for row, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and kinds[row] is TokenKind.NORMAL:
            kinds[row] = TokenKind.BYTE
    if "unk" in common["ids"]:
        kinds[common["ids"]["unk"]] = TokenKind.UNKNOWN
    worst = -float(len(ranks))
    scores = tuple(-float(ranks[token]) if token in ranks else worst for token in tokens)
    return GGUFTokenizer(
        "llama", "default", tuple(tokens), tuple(kinds), scores=scores, add_space=add_space, notes=notes, **common
    )


def _spaces(state: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether a text gets a space in front, which becomes ▁ like every other space."""
    normalizers = _sequence(state["normalizer"], "normalizers")
    replaced = [step for step in normalizers if step["type"] == "Replace" and step["content"] == _SPACE]
    prepended = [step for step in normalizers if step["type"] == "Prepend" and step["prepend"] == _SPACE]
    splits = _sequence(state["pre_tokenizer"], "pretokenizers")
    if len(replaced) + len(prepended) == len(normalizers) and len(replaced) == 1 and not splits:
        return bool(prepended), ()
    if not normalizers and len(splits) == 1 and splits[0]["type"] == "Metaspace" and not splits[0].get("split", True):
        scheme = splits[0].get("prepend_scheme", "always")
        if scheme == "never":
            return False, ()
        notes = ["llama.cpp puts a space before text that begins with one, too; the tokenizer does not."]
        if scheme == "first":
            notes.append(
                "llama.cpp puts a space before text after a special token; the tokenizer only before the first."
            )
        return True, tuple(notes)
    raise FormatError(
        "llama.cpp does not treat spaces as this tokenizer: "
        f"{_shown(state['normalizer'])}, {_shown(state['pre_tokenizer'])}",
        _REMEDY,
    )


def _sequence(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """A step of tokenizer.json as the list of steps that it is."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _shown(step: Mapping[str, Any] | None) -> str:
    return json.dumps(step, ensure_ascii=False)
