"""Calibration one layer at a time: one layer's weights and moments are in memory, hidden states lie in files.

A layer's statistics need its input, and for Fisher weights the loss's gradient at its output. Forward, each layer makes
the next one's inputs. With gradients the inputs of all layers are kept in files; then the layers are passed again from
the last to the first, each computed anew with its own graph, and hand the gradient at their input to the one before.
Every layer that is done lies in a file, and a run that was killed goes on after the last of them. The sums are those of
`calibrate.collect`, up to the order in which floats are added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from mla_convert.calibrate.accumulate import LayerAccumulator
from mla_convert.calibrate.collect import (
    check_finite,
    fit_constants,
    loss_gradient_at_hidden,
    recording_attention,
    sampling,
    stages_of,
)
from mla_convert.calibrate.recorder import LayerRecorder
from mla_convert.calibrate.rows import RowFile
from mla_convert.calibrate.statistics import Provenance, Statistics, StoredLayers, save_statistics
from mla_convert.errors import OutputError
from mla_convert.progress import Progress, silent
from mla_convert.sources.streamed import StreamedDecoder
from mla_convert.spec import SourceSpec

BACKWARD = ("pairs", "content", "held_out")


def collect_layerwise(
    decoder: StreamedDecoder,
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
        provenance: of the statistics: the seed, and whether to take gradients and to hold contexts out.
        noise: contexts of uniformly drawn tokens, of the same length.

    Raises:
        OutputError: the disk is full, or cannot be written.
        SourceError: the source's activations or gradients are not finite.
        StatisticsError: there are too few contexts to set one aside, or statistics cannot be written.
    """
    return _Run(decoder, spec, windows, provenance, folder, noise, progress or silent).collect()


class _Run:
    def __init__(
        self,
        decoder: StreamedDecoder,
        spec: SourceSpec,
        windows: Tensor,
        provenance: Provenance,
        folder: Path,
        noise: Tensor | None,
        progress: Progress,
    ) -> None:
        self.decoder, self.spec, self.provenance, self.folder = decoder, spec, provenance, folder
        self.contexts = windows if noise is None else torch.cat((windows, noise))
        self.stages: list[tuple[str, int]] = stages_of(len(windows), provenance.gradients, provenance.held_out)
        self.stages += [("noise", i) for i in range(len(windows), len(self.contexts))]
        self.stored = StoredLayers(folder, spec.num_layers, provenance)
        sweeps = 2 if provenance.gradients else 1
        self._report, self._done, self._total = progress, 0, sweeps * spec.num_layers * len(self.contexts)

    def collect(self) -> StoredLayers:
        self._claim()
        if not all(self.stored.has(i) for i in range(self.spec.num_layers)):
            with recording_attention(self.decoder.model), torch.no_grad():
                self.arguments = self._arguments()
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

    def _arguments(self) -> Sequence[dict[str, Any]]:
        """What each layer is called with: all contexts are equally long and start at position 0."""
        length, device = self.contexts.shape[1], self._device
        positions = torch.arange(length, device=device)[None]
        return self.decoder.model.model.layer_arguments(torch.empty(1, length, 0, device=device), None, positions)

    @property
    def _device(self) -> torch.device:
        return cast("Tensor", self.decoder.model.model.rotary_emb.inv_freq).device

    def _forward_only(self) -> None:
        first = 0
        while first < self.spec.num_layers and self.stored.has(first):
            first += 1
        if not self._hidden(first).complete:
            first = 0
        if first == 0:
            self._embed()
        self._done = first * len(self.contexts)
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
        self._done = (2 * count - 1 - last) * len(self.contexts)
        for i in range(last, -1, -1):
            self._backward(i)
            self._gradient(i + 1).remove()
            self._hidden(i).remove()

    def _embed(self) -> None:
        with self._hidden(0).writing() as rows:
            for i, row in enumerate(self.decoder.embed(self.contexts)):
                rows.write(i, row)

    def _pass(self, index: int, *, record: bool) -> None:
        """Write the layer's outputs, the next one's inputs; with `record` its statistics too."""
        accumulator = LayerAccumulator(self.spec)
        inputs = self._hidden(index)
        with self._recorded(index, accumulator) as (layer, recorder), self._hidden(index + 1).writing() as outputs:
            for stage, i in self.stages if record else [("plain", i) for i in range(len(self.contexts))]:
                recorder.begin(stage)
                outputs.write(i, layer(inputs.read(i).to(self._device), **self.arguments[index]))
                self._step()
        if record:
            self._keep(index, accumulator)

    @contextmanager
    def _recorded(self, index: int, accumulator: LayerAccumulator) -> Iterator[tuple[Any, LayerRecorder]]:
        """Within it, the layer has its weights and a recorder."""
        recorder = LayerRecorder(self.spec, index, self.contexts.shape[1], self._device, accumulator)
        with self.decoder.layer(index) as layer:
            layer.self_attn.calibration_recorder = recorder
            try:
                yield layer, recorder
            finally:
                del layer.self_attn.calibration_recorder  # and the moments that it holds

    def _gradients_at_the_end(self) -> None:
        """Write the loss's gradients at the last layer's outputs."""
        outputs = self._hidden(self.spec.num_layers)
        with self.decoder.head() as model, self._gradient(self.spec.num_layers).writing() as gradients:
            for i in sorted({i for stage, i in self.stages if stage in BACKWARD}):
                hidden = outputs.read(i).to(model.lm_head.weight.device).requires_grad_(True)
                with torch.enable_grad():
                    loss_gradient_at_hidden(model, model.model.norm(hidden), sampling(self.provenance.seed, i))
                gradients.write(i, _gradient_of(hidden))
            gradients.extend(len(self.contexts))
        outputs.remove()

    def _backward(self, index: int) -> None:
        """Record a layer, whose inputs and whose outputs' gradients are known; write the gradients at its inputs."""
        accumulator = LayerAccumulator(self.spec)
        inputs, at_outputs = self._hidden(index), self._gradient(index + 1)
        with self._recorded(index, accumulator) as (layer, recorder), self._gradient(index).writing() as gradients:
            for stage, i in self.stages:
                if stage in ("content", "held_out") and accumulator.constants is None:
                    fit_constants([accumulator], self.spec)
                recorder.begin(stage)
                hidden = inputs.read(i).to(self._device)
                if stage not in BACKWARD:
                    layer(hidden, **self.arguments[index])
                else:
                    hidden.requires_grad_(True)
                    with torch.enable_grad():
                        layer(hidden, **self.arguments[index]).backward(at_outputs.read(i).to(self._device))
                    recorder.finish()
                    gradients.write(i, _gradient_of(hidden))
                self._step()
            gradients.extend(len(self.contexts))
        self._keep(index, accumulator)

    def _keep(self, index: int, accumulator: LayerAccumulator) -> None:
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

    def _step(self) -> None:
        self._done += 1
        self._report("calibrate", self._done, self._total)


def _gradient_of(hidden: Tensor) -> Tensor:
    """The gradient that a backward pass has left."""
    if hidden.grad is None:
        raise RuntimeError("the backward pass did not reach the layer's input")
    return hidden.grad
