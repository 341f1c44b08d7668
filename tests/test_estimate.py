"""What a conversion is expected to take, against tensors that are really there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mla_convert.estimate import (
    LIBRARIES,
    SHARD,
    VERIFIED,
    converted_attention,
    embedding_weights,
    estimate,
    feed_forward_weights,
    source_attention,
)
from mla_convert.pipeline import VERIFY_BYTES
from mla_convert.plan import make_plan
from mla_convert.recipe import load_recipe
from mla_convert.sources import open_source
from mla_convert.spec import BlockSpec, MLAShape, QKNormSpec
from tests.mla.native import native
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


def test_the_sources_numbers_are_all_counted(tmp_path: Path) -> None:
    for tied in (True, False):
        model = tiny_llama(tied=tied)
        spec = open_source(str(save_source(model, tmp_path / str(tied)))).spec
        counted = embedding_weights(spec) + 2 * (feed_forward_weights(spec, 0) + source_attention(spec))
        matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
        assert counted == matrices


def test_the_converted_attentions_numbers_are_all_counted() -> None:
    attention = native().model.layers[0].self_attn
    spec = replace(PLAIN, hidden_size=36, num_heads=4, head_dim=8)
    shape = MLAShape(kv_rank=10, rope_dim=6, nope_dim=8, value_dim=7)
    assert converted_attention(spec, shape) == sum(p.numel() for p in attention.parameters() if p.ndim == 2)


def test_experts_and_norms_of_keys_count() -> None:
    block = BlockSpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=5, expert_layers=(True, False) * 2)
    mixed = replace(PLAIN, block=block)
    assert feed_forward_weights(mixed, 0) == 4 * 3 * 32 * 5 + 4 * 32  # experts and their router
    assert feed_forward_weights(mixed, 1) == feed_forward_weights(PLAIN, 1) == 3 * 32 * 64
    shared = replace(PLAIN, block=replace(block, shared_expert_intermediate_size=7))
    assert feed_forward_weights(shared, 0) - feed_forward_weights(mixed, 0) == 3 * 32 * 7 + 32
    assert feed_forward_weights(replace(PLAIN, block=BlockSpec(mlp="plain")), 0) == 2 * 32 * 64
    shape, normed = MLAShape(10, 4, 8, 8, 2), replace(PLAIN, qk_norm=QKNormSpec("head", 1e-6))
    # the source's own queries and keys (4 + 2 heads of 8), and a block [12, 8] a head in place of rows of 32
    more = converted_attention(normed, shape) - converted_attention(PLAIN, shape)
    assert more == (4 + 2) * 8 * 32 + 4 * 12 * 8 - 4 * 12 * 32


def test_disk_is_what_is_written_and_memory_holds_a_shard_of_it() -> None:
    plan = make_plan(PLAIN, recipe=load_recipe("exact"), cache=1.0)
    small = estimate(plan, "bfloat16", 0)
    assert estimate(plan, "float32", 0).disk == 2 * small.disk
    assert small.statistics == 0
    assert LIBRARIES < small.memory < LIBRARIES + 2**24
    huge = replace(PLAIN, hidden_size=2**14, intermediate_size=2**16, num_layers=40, windows=(None,) * 40)
    large = estimate(make_plan(huge, recipe=load_recipe("exact"), cache=1.0), "bfloat16", VERIFIED + 1)
    assert large.disk > 10 * SHARD
    assert LIBRARIES + SHARD < large.memory < LIBRARIES + 2 * SHARD


def test_calibration_holds_the_source_in_float32() -> None:
    wide = replace(PLAIN, hidden_size=4096, intermediate_size=16384, vocab_size=10**5)
    plan = make_plan(wide, recipe=load_recipe("default"), cache=0.5)
    weights = embedding_weights(wide) + 4 * (feed_forward_weights(wide, 0) + source_attention(wide))
    found = estimate(plan, "bfloat16", VERIFIED + 1)
    assert 4 * weights < found.memory - LIBRARIES < 1.2 * 4 * weights


def test_what_is_verified_is_what_the_conversion_verifies() -> None:
    assert VERIFIED == VERIFY_BYTES


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what a process alone held")
def test_a_tiny_conversion_takes_about_what_the_libraries_take(tmp_path: Path) -> None:
    folder = save_source(tiny_llama(), tmp_path / "source")
    arguments = ["convert", str(folder), str(tmp_path / "mla"), "--recipe", "exact", "--quiet"]
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], check=True, capture_output=True, text=True)
    peak = int(done.stdout.split()[-1]) * 1024
    spec = open_source(str(folder)).spec
    expected = estimate(make_plan(spec, recipe=load_recipe("exact"), cache=1.0), "float32", 0)
    # the libraries' share depends on their versions and on the machine
    assert 0.5 < peak / expected.memory < 1.5
    content = (tmp_path / "mla" / "model.safetensors").read_bytes()
    written = len(content) - 8 - int.from_bytes(content[:8], "little")
    # norms are not in the estimate
    assert 1.0 < written / expected.disk < 1.1
