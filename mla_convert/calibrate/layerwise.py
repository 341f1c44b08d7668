"""Calibration one layer at a time: one layer's weights and moments are in memory, hidden states lie in files.

A layer's statistics need its input, and for Fisher weights the loss's gradient at its output. Forward, each layer makes
the next one's inputs. With gradients the inputs of all layers are kept in files; then the layers are passed again from
the last to the first, each computed anew with its own graph, and hand the gradient at their input to the one before.
Every layer that is done lies in a file, and a run that was killed goes on after the last of them. The sums are those of
`calibrate.collect`, up to the order in which floats are added.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mla_convert.calibrate.accumulate import LayerAccumulator
from mla_convert.calibrate.collect import (
    BACKWARD,
    CONTENT,
    check_finite,
    fit_constants,
    loss_gradient_at_hidden,
    parts_of,
    recording_attention,
    sampling,
    stages_of,
    total,
)
from mla_convert.calibrate.parallel import Stage, Steps, on_each, shares
from mla_convert.calibrate.recorder import LayerRecorder
from mla_convert.calibrate.rows import RowFile
from mla_convert.calibrate.statistics import Provenance, Statistics, StoredLayers, save_statistics
from mla_convert.errors import OutputError
from mla_convert.memory import release_freed_memory
from mla_convert.progress import Progress, silent
from mla_convert.sources.streamed import StreamedDecoder
from mla_convert.spec import SourceSpec


def collect_layerwise(
    decoders: Sequence[StreamedDecoder],
    spec: SourceSpec,
    windows: Int[Tensor, "n S"],
    provenance: Provenance,
    folder: Path,
    *,
    noise: Int[Tensor, "m S"] | None = None,
    progress: Progress | None = None,
) -> StoredLayers:
    """Run the decoder over the token contexts, layer by layer, and return the moments of every layer, in files.

    ``folder`` holds statistics.IIIII.safetensors of each layer that is done, and meanwhile the hidden states: of two
    layers, or with gradients of all. What is there already must be of the same provenance, or is replaced.

    Args:
        decoders: the source's, on every device that is to share the contexts.
        provenance: of the statistics: the seed, and whether to take gradients and to hold contexts out.
        noise: contexts of uniformly drawn tokens, of the same length.

    Raises:
        OutputError: the disk is full, or cannot be written.
        SourceError: the source's activations or gradients are not finite.
        StatisticsError: there are too few contexts to set one aside, or statistics cannot be written.
    """
    return _Run(decoders, spec, windows, provenance, folder, noise, progress or silent).collect()


class _Run:
    def __init__(
        self,
        decoders: Sequence[StreamedDecoder],
        spec: SourceSpec,
        windows: Tensor,
        provenance: Provenance,
        folder: Path,
        noise: Tensor | None,
        progress: Progress,
    ) -> None:
        self.decoders, self.spec, self.provenance, self.folder = decoders, spec, provenance, folder
        self.contexts = windows if noise is None else torch.cat((windows, noise))
        self.stages: list[Stage] = stages_of(len(windows), provenance.gradients, provenance.held_out)
        self.stages += [("noise", i) for i in range(len(windows), len(self.contexts))]
        self.stored = StoredLayers(folder, spec.num_layers, provenance)
        sweeps = 2 if provenance.gradients else 1
        self._steps = Steps(progress, "calibrate", sweeps * spec.num_layers * len(self.contexts))

    def collect(self) -> StoredLayers:
        self._claim()
        if not all(self.stored.has(i) for i in range(self.spec.num_layers)):
            with ExitStack() as stack, torch.no_grad():
                for decoder in self.decoders:
                    stack.enter_context(recording_attention(decoder.model))
                self.arguments = [self._arguments(decoder) for decoder in self.decoders]
                (self._with_gradients if self.provenance.gradients else self._forward_only)()
        for index in range(self.spec.num_layers + 1):
            self._hidden(index).remove()
            self._gradient(index).remove()
        return self.stored

    def _claim(self) -> None:
        """Make the folder, and remove what is of another calibration: hidden states do not say whose they are."""
        marker, written = self.folder / "calibration.json", json.dumps(asdict(self.provenance), sort_keys=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not marker.is_file() or marker.read_text(encoding="utf-8") != written:
                for kind in ("hidden", "gradient", "statistics"):
                    for left in self.folder.glob(f"{kind}.*"):
                        left.unlink()
                marker.write_text(written, encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"cannot write {self.folder}: {error.strerror or error}", "free some disk space, or choose another OUT"
            ) from error

    def _arguments(self, decoder: StreamedDecoder) -> Sequence[dict[str, Any]]:
        """What each layer is called with: all contexts are equally long and start at position 0."""
        length, device = self.contexts.shape[1], decoder.device
        positions = torch.arange(length, device=device)[None]
        return decoder.model.model.layer_arguments(torch.empty(1, length, 0, device=device), None, positions)

    def _forward_only(self) -> None:
        first = 0
        while first < self.spec.num_layers and self.stored.has(first):
            first += 1
        if not self._hidden(first).complete:
            first = 0
        if first == 0:
            self._embed()
        self._steps.done = first * len(self.contexts)
        for i in range(first, self.spec.num_layers):
            self._pass(i, record=True)
            self._hidden(i).remove()

    def _with_gradients(self) -> None:
        count = self.spec.num_layers
        last = count - 1
        while last >= 0 and self.stored.has(last):
            last -= 1
        if not (self._gradient(last + 1).complete and all(self._hidden(i).complete for i in range(last + 1))):
            last = count - 1
            ready = max((i for i in range(count + 1) if self._hidden(i).complete), default=None)
            if ready is None or not all(self._hidden(i).complete for i in range(ready)):
                self._embed()
                ready = 0
            for i in range(ready, count):
                self._pass(i, record=False)
            self._gradients_at_the_end()
        self._steps.done = (2 * count - 1 - last) * len(self.contexts)
        for i in range(last, -1, -1):
            self._backward(i)
            self._gradient(i + 1).remove()
            self._hidden(i).remove()

    def _embed(self) -> None:
        with self._hidden(0).writing() as rows:
            for i, row in enumerate(self.decoders[0].embed(self.contexts)):
                rows.write(i, row)

    def _pass(self, index: int, *, record: bool) -> None:
        """Write the layer's outputs, the next one's inputs; with `record` its statistics too."""
        inputs = self._hidden(index)
        stages = self.stages if record else [("plain", i) for i in range(len(self.contexts))]
        with self._recorded(index) as recorded, self._hidden(index + 1).writing() as outputs:

            def run(at: _Recorded, stage: str, i: int) -> None:
                outputs.write(i, at.layer(inputs.read(i).to(at.device), **at.arguments))

            self._on_each(recorded, stages, run)
        if record:
            self._keep(index, recorded)

    def _on_each(self, recorded: Sequence[_Recorded], stages: Sequence[Stage], run: _Context) -> None:
        """Run the stages' contexts, dealt out to the devices."""
        dealt = shares(stages, len(recorded))

        def work(device: int, stop: Event) -> None:
            at = recorded[device]
            with torch.no_grad():  # which is each thread's own
                for stage, i in dealt[device]:
                    if stop.is_set():
                        return
                    at.recorder.begin(stage)
                    run(at, stage, i)
                    self._steps.step()

        on_each(len(recorded), work)

    @contextmanager
    def _recorded(self, index: int) -> Iterator[list[_Recorded]]:
        """Within it, the layer has its weights and a recorder on every device."""
        recorded: list[_Recorded] = []
        with ExitStack() as stack:
            for decoder, arguments in zip(self.decoders, self.arguments, strict=True):
                sums, device = LayerAccumulator(self.spec), decoder.device
                recorder = LayerRecorder(self.spec, index, self.contexts.shape[1], device, sums)
                layer = stack.enter_context(decoder.layer(index))
                layer.self_attn.calibration_recorder = recorder
                recorded.append(_Recorded(layer, arguments[index], recorder, device))
            try:
                yield recorded
            finally:
                for at in recorded:
                    del at.layer.self_attn.calibration_recorder
        release_freed_memory()  # what the layer's weights took

    def _gradients_at_the_end(self) -> None:
        """Write the loss's gradients at the last layer's outputs."""
        outputs = self._hidden(self.spec.num_layers)
        with self.decoders[0].head() as model, self._gradient(self.spec.num_layers).writing() as gradients:
            for i in sorted({i for stage, i in self.stages if stage in BACKWARD}):
                hidden = outputs.read(i).to(model.lm_head.weight.device).requires_grad_(True)
                with torch.enable_grad():
                    loss_gradient_at_hidden(model, model.model.norm(hidden), sampling(self.provenance.seed, i))
                gradients.write(i, _gradient_of(hidden))
            gradients.extend(len(self.contexts))
        outputs.remove()

    def _backward(self, index: int) -> None:
        """Record a layer, whose inputs and whose outputs' gradients are known; write the gradients at its inputs."""
        inputs, at_outputs = self._hidden(index), self._gradient(index + 1)
        with self._recorded(index) as recorded, self._gradient(index).writing() as gradients:

            def run(at: _Recorded, stage: str, i: int) -> None:
                hidden = inputs.read(i).to(at.device)
                if stage not in BACKWARD:
                    at.layer(hidden, **at.arguments)
                    return
                hidden.requires_grad_(True)
                with torch.enable_grad():
                    at.layer(hidden, **at.arguments).backward(at_outputs.read(i).to(at.device))
                at.recorder.finish()
                gradients.write(i, _gradient_of(hidden))

            for part in parts_of(self.stages):
                if any(stage in CONTENT for stage, _ in part):
                    fit_constants([[at.recorder.accumulator] for at in recorded], self.spec)
                self._on_each(recorded, part, run)
            gradients.extend(len(self.contexts))
        self._keep(index, recorded)

    def _keep(self, index: int, recorded: Sequence[_Recorded]) -> None:
        [accumulator] = total([[at.recorder.accumulator] for at in recorded])
        check_finite(index, accumulator)
        layer = Statistics((accumulator.statistics(),), self.provenance)
        save_statistics(layer, self.stored.path(index))

    def _hidden(self, index: int) -> RowFile:
        """The inputs of a layer."""
        return self._file("hidden", index)

    def _gradient(self, index: int) -> RowFile:
        """The loss's gradients at the inputs of a layer."""
        return self._file("gradient", index)

    def _file(self, kind: str, index: int) -> RowFile:
        n, length = self.contexts.shape
        return RowFile(self.folder / f"{kind}.{index:05d}.f32", (n, length, self.spec.hidden_size))


@dataclass(frozen=True)
class _Recorded:
    """A layer on one device, what it is called with beside its input, and what notes its attention."""

    layer: Any
    arguments: dict[str, Any]
    recorder: LayerRecorder
    device: torch.device


# What is done with a context: on which device, for which stage, and its place.
_Context = Callable[[_Recorded, str, int], None]


def _gradient_of(hidden: Tensor) -> Tensor:
    """The gradient that a backward pass has left."""
    if hidden.grad is None:
        raise RuntimeError("the backward pass did not reach the layer's input")
    return hidden.grad
