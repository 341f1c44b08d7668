import subprocess
import sys

import pytest

from mla_convert.maths.footprint import (
    element_bytes,
    gqa_elements,
    mha_elements,
    mla_elements,
    mqa_elements,
    relative_change,
)

# DeepSeek-V3's published sizes: 128 heads of 128, latent 512, RoPE key 64.
HEADS, HEAD_DIM, KV_RANK, ROPE_DIM = 128, 128, 512, 64


def test_deepseek_v3_caches_1152_bytes_where_mha_would_cache_65536():
    mha, mla = mha_elements(HEADS, HEAD_DIM), mla_elements(KV_RANK, ROPE_DIM)
    assert (mha, element_bytes(mha, 2)) == (32_768, 65_536)
    assert (mla, element_bytes(mla, 2)) == (576, 1_152)
    assert round(100 * relative_change(mla, mha), 2) == -98.24


def test_deepseek_v3_against_gqa_of_8_kv_heads():
    gqa = gqa_elements(8, HEAD_DIM)
    assert (gqa, element_bytes(gqa, 2)) == (2_048, 4_096)
    assert round(100 * relative_change(mla_elements(KV_RANK, ROPE_DIM), gqa), 2) == -71.88


def test_mqa_is_gqa_with_one_kv_head_and_mha_with_one_per_query_head():
    assert mqa_elements(HEAD_DIM) == gqa_elements(1, HEAD_DIM) == 256
    assert mha_elements(HEADS, HEAD_DIM) == gqa_elements(HEADS, HEAD_DIM)


@pytest.mark.parametrize(("elements", "change"), [(384, 0.0), (192, -0.5), (768, 1.0)])
def test_relative_change_is_zero_at_the_baseline_and_negative_below(elements, change):
    assert relative_change(elements, 384) == change


def test_footprints_need_no_torch():
    code = "import sys, mla_convert.maths.footprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
