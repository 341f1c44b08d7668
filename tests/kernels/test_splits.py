"""The number of splits: from shapes, enough to fill a device, and no more."""

from mla_kernels.splits import MAX_SPLITS, choose_splits

# Hopper at rank 512: two blocks on each of 132 multiprocessors.
H200 = {"block_n": 32, "rank": 512, "token_bytes": 1152, "slots": 264}


def test_one_long_sequence_fills_the_device() -> None:
    splits = choose_splits(row_blocks=1, rows=16, batch=1, capacity=131072, **H200)
    assert 200 <= splits <= 264


def test_a_batch_that_fills_the_device_is_hardly_split() -> None:
    assert choose_splits(row_blocks=1, rows=16, batch=264, capacity=8192, **H200) == 1
    assert choose_splits(row_blocks=1, rows=16, batch=64, capacity=8192, **H200) <= 4


def test_a_last_wave_that_is_nearly_empty_is_avoided() -> None:
    """160 blocks on 264 slots: two splits take two waves, as five in three would fill four fifths more."""
    splits = choose_splits(row_blocks=1, rows=16, batch=160, capacity=65536, **H200)
    blocks = 160 * splits
    waves = -(-blocks // 264)
    assert blocks / (waves * 264) > 0.9


def test_a_short_cache_is_one_split() -> None:
    assert choose_splits(row_blocks=1, rows=16, batch=1, capacity=32, **H200) == 1


def test_no_split_is_without_tiles_and_none_beyond_the_limit() -> None:
    assert choose_splits(row_blocks=1, rows=16, batch=1, capacity=320, **H200) <= 10
    assert choose_splits(row_blocks=1, rows=1, batch=1, capacity=1 << 24, **{**H200, "slots": 10000}) <= MAX_SPLITS


def test_many_heads_pay_for_their_partial_results() -> None:
    """128 heads write 128 rows of float32 for each split; at a short cache that is more than the cache itself."""
    few = choose_splits(row_blocks=2, rows=128, batch=1, capacity=2048, **H200)
    many = choose_splits(row_blocks=1, rows=1, batch=1, capacity=2048, **H200)
    assert few < many
