"""Stage global: the whole model trained towards its teacher's predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from mla_convert.errors import HealError
from mla_convert.heal.balance import balance
from mla_convert.heal.checkpoint import Checkpoints
from mla_convert.heal.data import HealingText
from mla_convert.heal.distil_run import STAGE, DistilResult, DistilRun
from mla_convert.heal.distil_settings import DistilSettings
from mla_convert.heal.teacher import check_teacher
from mla_convert.progress import Progress, silent

__all__ = ["STAGE", "DistilResult", "DistilSettings", "distil"]


def distil(
    student: Any,
    teacher: Any,
    text: HealingText,
    settings: DistilSettings,
    checkpoints: Checkpoints | None = None,
    progress: Progress | None = None,
) -> DistilResult:
    """Minimise KL(teacher || student) at every position of ``text``'s training windows, in their order.

    The student is trained in place, from factors of one size (`balance`), and ends with the weights that had the lowest
    KL on the held-out windows. Devices, processes and sharding are accelerate's. With ``checkpoints`` a run that was
    stopped goes on from its last one, on the CPU in float32 to the same bits; the teacher's top tokens are kept there
    too. KL to the source's predictions recovers more than cross-entropy on the text (X-EcoMLA, arXiv:2503.11132).
    With ``bf16`` the matrices that are not trained, and the teacher's, stay in bfloat16 afterwards.

    Args:
        student: a converted model in float32.
        teacher: a model with the same vocabulary, in evaluation mode.
        checkpoints: shared by all processes.
        progress: called with the stage ``distil`` after each step, in the first process alone.

    Raises:
        HealError: the teacher does not fit, the loss or its gradient is not finite, the student is not in float32,
            accelerate's config is DeepSpeed's, or the checkpoints are of another run.
        TextError: the text has fewer windows than a step takes.
        OutputError: a checkpoint cannot be written.
    """
    check_teacher(student, teacher, hidden=settings.hidden_weight > 0)
    accelerator = Accelerator(gradient_accumulation_steps=settings.accumulate)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise HealError(
            "checkpoints that resume exactly are not made under DeepSpeed", "choose FSDP in `accelerate config`"
        )
    if settings.optimizer == "muon" and accelerator.distributed_type == DistributedType.FSDP:
        raise HealError("Muon needs whole matrices, which FSDP cuts", "choose the optimizer adamw")
    with _prepared(student, settings) as trained:
        balance(student)
        if settings.bf16 and accelerator.distributed_type != DistributedType.FSDP:  # which wants one dtype
            for model in (student, teacher):
                _halve(model, trained)
        run = DistilRun(accelerator, student, teacher, text, settings, checkpoints, trained)
        with torch.random.fork_rng():
            return run.to_the_end(progress or silent)


def _halve(model: Any, trained: Mapping[str, Tensor]) -> None:
    """Keep the frozen matrices of the layers in bfloat16, which autocast would make of them at every use."""
    kept = {id(parameter) for parameter in trained.values()} | {id(model.get_input_embeddings().weight)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in kept:
            module.to(torch.bfloat16)


@contextmanager
def _prepared(student: Any, settings: DistilSettings) -> Iterator[dict[str, Tensor]]:
    """Within it, the parameters that it yields by name are trained and no others; what else is set is set back."""
    required = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    training = student.training
    chosen = [name for name in required if settings.parameters == "all" or ".self_attn." in name]
    trained = {name: parameter for name, parameter in student.named_parameters() if name in chosen}
    wrong = {str(parameter.dtype) for parameter in trained.values()} - {"torch.float32"}
    if wrong:
        raise HealError(
            f"the student's weights are {wrong.pop()}, too coarse for small steps",
            "load it in float32; bf16 in the settings computes in bfloat16 all the same",
        )
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in trained)
    if settings.gradient_checkpointing:
        _switch_checkpointing(student, on=True)
    try:
        yield trained
    finally:
        if settings.gradient_checkpointing:
            _switch_checkpointing(student, on=False)
        student.train(training)
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(required.get(name, False))
            parameter.grad = None


def _switch_checkpointing(student: Any, *, on: bool) -> None:
    """Have the layers recompute their activations in the backward pass, or keep them."""
    # transformers renamed the methods, and their argument, from `gradient_...` to `activation_...`.
    kind = "activation" if hasattr(student, "activation_checkpointing_enable") else "gradient"
    if on:
        # The reentrant kind gives no gradient where a layer's input, from a frozen embedding, has none.
        options = {f"{kind}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(student, f"{kind}_checkpointing_enable")(**options)
    else:
        getattr(student, f"{kind}_checkpointing_disable")()
        student.disable_input_require_grads()
