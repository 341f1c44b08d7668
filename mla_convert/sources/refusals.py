"""Why an architecture is not converted: a message and a remedy for each kind, from the config and file names alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert.errors import SourceError, UnsupportedArchitectureError

ADD_A_MODEL = "docs/add-a-model.md"


@dataclass(frozen=True)
class _Kind:
    """A kind of model that this conversion is not for.

    Attributes:
        names: class names of that kind; the group ``stem`` is the family's part of the name.
        what: what it is.
        remedy: what to do; ``{stem}`` stands for the family's part of the name, ``{class_name}`` for its causal
            language model.
    """

    names: re.Pattern[str]
    what: str
    remedy: str


_OWN = _Kind(
    re.compile(r"MLAForCausalLM|DeepseekMLAForCausalLM"),
    "already converted: it is what this project writes",
    "convert its source, which conversion.json names; evaluate, generate, heal and export take the folder as it is",
)
_ENCODER_DECODER = _Kind(
    re.compile(
        r"(T5|MT5|UMT5|LongT5|SwitchTransformers|T5Gemma|Bart|MBart|Pegasus|PegasusX|Blenderbot|BlenderbotSmall|M2M100"
        r"|NllbMoe|Marian|LED|BigBirdPegasus|ProphetNet|FSMT|PLBart|EncoderDecoder|Whisper|Speech2Text)"
        r"(For\w+|MTModel|EncoderModel|Model)"
    ),
    "an encoder-decoder: its decoder attends to an encoder too, and that attention is not converted",
    "use a decoder-only model",
)
_STATE_SPACE = _Kind(
    re.compile(
        r"(Mamba|Mamba2|FalconMamba|Jamba|Zamba|Zamba2|Bamba|Rwkv\w*|RWKV\w*|RecurrentGemma|FalconH1|NemotronH"
        r"|GraniteMoeHybrid|Qwen3Next|Lfm2|Lfm2Moe|MiniMax|MiniMaxText01|xLSTM|OlmoHybrid|KimiLinear|Hymba|RetNet)"
        r"(ForCausalLM|LMHeadModel|Model)"
    ),
    "a state-space model or a hybrid: layers of it keep a recurrent state instead of keys and values",
    "use a model whose layers are all softmax attention",
)
_MULTIMODAL = _Kind(
    re.compile(r"(?P<stem>\w+)ForConditionalGeneration"),
    "a multimodal model: its language model is wrapped in inputs of images or sound",
    "use a text-only checkpoint of the family, or load it in transformers and save its language model alone as the "
    "family's causal language model ({stem}ForCausalLM where there is one)",
)
_ENCODER = _Kind(
    re.compile(
        r"(?P<stem>\w+)(ForMaskedLM|ForPreTraining|ForNextSentencePrediction)"
        r"|\w*(Bert|Roberta|RoBERTa|BERT|Electra|Deberta|DebertaV2|MPNet)(For(?!CausalLM)\w+|Model)"
    ),
    "an encoder: it reads text in both directions and keeps no cache",
    "use a causal language model",
)
_TASK_HEAD = _Kind(
    re.compile(
        r"(?P<stem>\w+?)(For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice|ForRewardModel"
        r"|RewardModel|ForRewardModeling|ForProcessRewardModel|ForEmbedding|DoubleHeadsModel)"
    ),
    "a model with the head of another task in place of the language model's",
    "use the causal language model that it was made from ({class_name}): a conversion needs its output head",
)
_BODY = _Kind(
    re.compile(r"(?P<stem>\w+)(?<!LMHead)Model"),
    "the body of a model without its output head",
    "use the causal language model of the family ({class_name}): a conversion needs its output head",
)
_BY_NAME = (_OWN, _ENCODER_DECODER, _STATE_SPACE, _MULTIMODAL, _ENCODER, _TASK_HEAD, _BODY)

# llama.cpp's names of architectures of these kinds.
_GGUF: Mapping[str, _Kind] = {
    **dict.fromkeys(("t5", "t5encoder"), _ENCODER_DECODER),
    **dict.fromkeys(
        ("mamba", "mamba2", "jamba", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "falcon-h1", "nemotron_h", "lfm2"),
        _STATE_SPACE,
    ),
    **dict.fromkeys(("granitehybrid", "plamo2", "qwen3next", "kimi-linear"), _STATE_SPACE),
    **dict.fromkeys(("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "modern-bert", "neo-bert"), _ENCODER),
    "clip": _MULTIMODAL,
}
_GGUF_LATENT = ("deepseek2", "minicpm3", "plm")

# Fields and layer types that say of a config what its class's name may not.
_OWN_TYPES = ("mla_convert", "deepseek_mla")
_STATE_FIELDS = ("ssm_cfg", "mamba_d_state", "mamba_d_ssm", "mamba_d_conv", "ssm_state_size", "linear_num_value_heads")
_STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid"}
_SENSES = ("vision_config", "audio_config", "thinker_config", "vision_tower", "mm_vision_tower", "visual")


def adapter_folder(folder: Path) -> SourceError:
    """The refusal of a folder that holds a PEFT adapter (LoRA and its kin) instead of a model."""
    try:
        fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = fields.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None  # it is an adapter all the same
    named = f"'{base}'" if base else "its base model"
    return SourceError(
        f"'{folder}' holds a PEFT adapter" + (f" of {named}" if base else "") + ", not a model",
        f"merge it first: load {named} and the adapter with peft, call merge_and_unload() and save_pretrained, and "
        "convert what that writes",
    )


def refuse_architecture(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise where no adapter is for the model of a config.json, for the most telling reason there is.

    Args:
        fields: of config.json; ``architectures`` has an entry.
        known: the architectures that have an adapter; none of these is refused.

    Raises:
        UnsupportedArchitectureError: the first entry of ``architectures`` is not known.
    """
    architecture = str(fields["architectures"][0])
    if architecture in known:
        return
    latent = fields.get("kv_lora_rank")
    if latent and fields.get("model_type") not in _OWN_TYPES:
        raise UnsupportedArchitectureError(
            f"'{architecture}' is a model with multi-head latent attention already (kv_lora_rank is {latent})",
            "it needs no conversion: use a source with MHA, GQA or MQA",
        )
    kind = _kind(architecture, fields)
    if kind is None:
        raise unknown_architecture(architecture, known, remote_code=bool(fields.get("auto_map")))
    found = kind.names.fullmatch(architecture)
    stem = (found.groupdict().get("stem") if found is not None else None) or "..."
    # GPT-2's alone has another name (GPT2LMHeadModel).
    class_name = next((name for name in known if name == f"{stem}LMHeadModel"), f"{stem}ForCausalLM")
    remedy = kind.remedy.format(stem=stem, class_name=class_name)
    raise UnsupportedArchitectureError(f"'{architecture}' is {kind.what}", remedy)


def _kind(architecture: str, fields: Mapping[str, Any]) -> _Kind | None:
    """The kind of a model that this conversion is not for; None where nothing says so."""
    if fields.get("model_type") in _OWN_TYPES:
        return _OWN
    layers = {*(fields.get("layer_types") or ()), *(fields.get("layers_block_type") or ())}
    if layers & _STATE_LAYERS or any(fields.get(name) for name in _STATE_FIELDS):
        return _STATE_SPACE
    if fields.get("is_encoder_decoder"):
        return _ENCODER_DECODER
    by_name = next((kind for kind in _BY_NAME if kind.names.fullmatch(architecture)), None)
    if by_name in (None, _BODY) and any(fields.get(name) for name in _SENSES):
        return _MULTIMODAL
    # Code of its own may call a whole model what it likes (ChatGLMModel).
    return None if by_name is _BODY and fields.get("auto_map") else by_name


def refuse_gguf_architecture(architecture: str, file: str, known: Sequence[str]) -> None:
    """Raise where a GGUF file is of none of ``known``, llama.cpp's names, for the most telling reason there is.

    Raises:
        UnsupportedArchitectureError: so it is.
    """
    if architecture in known:
        return
    if architecture in _GGUF_LATENT:
        raise UnsupportedArchitectureError(
            f"'{file}' holds a model of GGUF architecture '{architecture}', with multi-head latent attention already",
            "it needs no conversion: use a source with MHA, GQA or MQA",
        )
    if (kind := _GGUF.get(architecture)) is not None:
        raise UnsupportedArchitectureError(
            f"the GGUF architecture '{architecture}' of '{file}' is {kind.what}", "use a model of another kind"
        )
    raise UnsupportedArchitectureError(
        f"no source adapter for the GGUF architecture '{architecture}' of '{file}'",
        f"use the model's safetensors checkpoint, of which more families are known, or a GGUF file of architecture "
        f"{' or '.join(known)}",
    )


def unknown_architecture(
    architecture: str, known: Sequence[str], *, remote_code: bool = False
) -> UnsupportedArchitectureError:
    """The refusal of an architecture that nobody has described yet."""
    near = nearest(architecture, known)
    kin = f"; its nearest known kin: {', '.join(near)}" if near else ""
    if remote_code:
        return UnsupportedArchitectureError(
            f"the code of '{architecture}' lies beside its weights (config.json has an auto_map), and no source "
            f"adapter describes it{kin}",
            f"no code of a checkpoint is run here: use one of {', '.join(known)}; {ADD_A_MODEL} shows how to add one",
        )
    return UnsupportedArchitectureError(
        f"no source adapter for '{architecture}'{kin}",
        f"use one of {', '.join(known)}; {ADD_A_MODEL} shows how to add one",
    )


def nearest(architecture: str, known: Sequence[str]) -> tuple[str, ...]:
    """Those of ``known`` whose family's name begins like that of ``architecture``, or is how that begins."""
    own = _family(architecture)

    def kin(other: str) -> bool:
        shorter, longer = sorted((own, other), key=len)
        return len(shorter) > 1 and longer.startswith(shorter)

    return tuple(one for one in known if kin(_family(one)))


def _family(architecture: str) -> str:
    """The letters that a class's name begins with, up to its version or its kind (``Qwen2MoeForCausalLM``: qwen)."""
    found = re.match(r"[A-Za-z]+", re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture))
    return found.group().lower() if found else ""
