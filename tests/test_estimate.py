"""What a conversion is expected to take, whole and a layer at a time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mla_convert.estimate import LIBRARIES, VERIFIED, Estimate, estimate
from mla_convert.pipeline import VERIFY_BYTES
from mla_convert.plan import make_plan
from mla_convert.recipe import load_recipe
from mla_convert.sizes import embedding_weights, feed_forward_weights, source_attention
from mla_convert.sources import open_source
from mla_convert.spec import SourceSpec
from tests.test_features import PLAIN
from tests.tiny import save_source, tiny_llama

# Runs a command and prints the process's own peak; what getrusage says would include that of the one that started it.
PEAK = """
import sys
from mla_convert.cli import run
code = run(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""

WIDE = replace(PLAIN, hidden_size=4096, intermediate_size=16384, vocab_size=10**5)


def deep(spec: SourceSpec, layers: int) -> SourceSpec:
    """The same layers, so many of them."""
    return replace(spec, num_layers=layers, windows=(None,) * layers)


def takes(spec: SourceSpec, recipe: str = "default", dtype: str = "bfloat16", tokens: int | None = None) -> Estimate:
    """Of a source whose files are too large to be verified as a whole."""
    method = load_recipe(recipe)
    if tokens is not None and method.calibration is not None:
        method = replace(method, calibration=replace(method.calibration, tokens=tokens))
    cache = 1.0 if recipe == "exact" else 0.5
    return estimate(make_plan(spec, recipe=method, cache=cache), dtype, VERIFIED + 1)


def test_the_output_is_what_is_written_and_no_shard_of_it_is_in_memory() -> None:
    small = takes(PLAIN, "exact")
    assert takes(PLAIN, "exact", "float32").output == 2 * small.output
    assert small.statistics == 0
    for way in (small.whole, small.by_layer):
        assert LIBRARIES < way.memory < LIBRARIES + 2**24
    large = takes(deep(replace(WIDE, vocab_size=1000), 400), "exact")
    assert large.output > 10 * 5 * 10**9  # ten shards
    assert large.by_layer.memory < LIBRARIES + 5 * 10**9


def test_the_whole_is_held_in_float32() -> None:
    weights = embedding_weights(WIDE) + 4 * (feed_forward_weights(WIDE, 0) + source_attention(WIDE))
    assert 4 * weights < takes(WIDE).whole.memory - LIBRARIES < 1.4 * 4 * weights


@pytest.mark.parametrize("recipe", ["default", "forward", "fast", "exact"])
def test_a_layer_at_a_time_memory_does_not_grow_with_layers(recipe: str) -> None:
    few, many = takes(deep(WIDE, 4), recipe), takes(deep(WIDE, 80), recipe)
    assert many.by_layer.memory == few.by_layer.memory
    assert many.by_layer.disk > 8 * few.by_layer.disk
    if recipe != "exact":  # which holds no more than a layer in either way
        assert many.by_layer.memory < many.whole.memory / 10


def test_a_wider_layer_or_a_larger_vocabulary_takes_more_memory() -> None:
    base = takes(WIDE)
    for larger in (replace(WIDE, intermediate_size=2**16), replace(WIDE, vocab_size=2 * 10**5)):
        found = takes(larger)
        assert found.by_layer.memory > base.by_layer.memory
        assert found.whole.memory > base.whole.memory


@pytest.mark.parametrize("recipe", ["default", "forward", "fast"])
def test_nothing_shrinks_with_tokens(recipe: str) -> None:
    """Of hidden states alone that grow; the whole model's are never on the disk, and statistics are sums."""
    found = [takes(WIDE, recipe, tokens=tokens) for tokens in (512, 4096, 32768, 2**20)]
    for less, more in pairwise(found):
        assert more.output == less.output
        assert more.statistics == less.statistics
        assert more.by_layer.scratch >= less.by_layer.scratch
        assert more.by_layer.disk >= less.by_layer.disk
        assert more.by_layer.memory >= less.by_layer.memory
        assert more.whole.memory >= less.whole.memory
    assert found[-1].by_layer.scratch > 2 * found[0].by_layer.scratch
    if recipe != "fast":  # whose refit keeps hidden states in either way
        assert found[-1].whole == found[0].whole


def test_without_gradients_fewer_hidden_states_are_kept() -> None:
    source = deep(WIDE, 40)
    default, forward = takes(source, tokens=2**20).by_layer, takes(source, "forward", tokens=2**20).by_layer
    assert default.scratch > 10 * forward.scratch
    assert default.memory > forward.memory


def test_a_mapped_file_counts_as_memory() -> None:
    plan = make_plan(PLAIN, recipe=load_recipe("exact"), cache=1.0)
    found, mapped = (estimate(plan, "bfloat16", 10**6, mapped=mapped) for mapped in (False, True))
    assert mapped.whole.memory - found.whole.memory == mapped.by_layer.memory - found.by_layer.memory == 10**6


def test_what_is_verified_is_what_the_conversion_verifies() -> None:
    assert VERIFIED == VERIFY_BYTES


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what a process alone held")
@pytest.mark.parametrize("way", ["--whole", "--low-memory"])
def test_a_tiny_conversion_takes_about_what_the_libraries_take(tmp_path: Path, way: str) -> None:
    folder = save_source(tiny_llama(), tmp_path / "source")
    arguments = ["convert", str(folder), str(tmp_path / "mla"), "--recipe", "exact", "--quiet", way]
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], check=True, capture_output=True, text=True)
    peak = int(done.stdout.split()[-1]) * 1024
    spec = open_source(str(folder)).spec
    expected = estimate(make_plan(spec, recipe=load_recipe("exact"), cache=1.0), "float32", 0)
    # the libraries' share depends on their versions and on the machine
    assert 0.5 < peak / expected.way(way == "--low-memory").memory < 1.5
    content = (tmp_path / "mla" / "model.safetensors").read_bytes()
    written = len(content) - 8 - int.from_bytes(content[:8], "little")
    # norms are not in the estimate
    assert 1.0 < written / expected.output < 1.1
