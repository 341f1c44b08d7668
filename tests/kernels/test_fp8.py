import pytest
import torch

from mla_kernels.errors import InvalidInputError, UnsupportedShapeError
from mla_kernels.fp8 import dequantize_latent, fp8_layout, quantize_latent

FINITE_CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def e4m3_value(code: int) -> float:
    """The number that an e4m3 code stands for, from the format's definition: bias 7, no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def random_rows(tokens: int, rank: int, rope_dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, rank + rope_dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rank", "rope_dim", "row_bytes"),
    [
        (512, 64, 656),  # FlashMLA's row: 512 codes, 16 bytes of scales, 128 bytes of RoPE
        (448, 64, 592),  # 448 + 16 + 128
        (192, 32, 272),  # 192 + 8 + 64, padded from 264
        (160, 32, 240),  # 160 + 8 + 64, padded from 232
        (96, 16, 144),  # 96 + 4 + 32, padded from 132
    ],
)
def test_row_sizes(rank, rope_dim, row_bytes):
    layout = fp8_layout(rank, rope_dim)
    assert layout.row_bytes == row_bytes
    assert layout.scale_offset == rank
    assert layout.scale_offset % 4 == 0
    assert layout.rope_offset == rank + 4 * layout.blocks
    assert layout.rope_offset % 2 == 0
    assert layout.rope_offset + 2 * rope_dim <= row_bytes


def test_all_finite_codes_survive_a_round_trip():
    """A token whose largest channel is 448 has the scale 1, so every channel is kept exactly."""
    assert len(FINITE_CODES) == 254
    values = torch.tensor([e4m3_value(int(code)) for code in FINITE_CODES])
    rows = torch.zeros(1, 256 + 16)
    rows[0, :127], rows[0, 128:255] = values[:127], values[127:]
    rows[0, 127], rows[0, 255] = 448.0, 448.0
    packed = quantize_latent(rows, 256)
    assert packed[0, :127].tolist() == FINITE_CODES[:127].tolist()
    assert packed[0, 128:255].tolist() == FINITE_CODES[127:].tolist()
    assert torch.equal(dequantize_latent(packed, 256, 16), rows)


def test_flash_mla_byte_positions():
    """512 codes, four float32 scales, 64 bfloat16 RoPE channels, little-endian."""
    rows = torch.zeros(1, 576)
    for block, amax in enumerate((448.0, 896.0, 56.0, 448.0)):
        rows[0, 128 * block + block] = amax
    rows[0, 512:] = torch.arange(64) - 31.5
    packed = quantize_latent(rows, 512)
    assert packed.shape == (1, 656)
    assert packed.dtype == torch.uint8
    assert [packed[0, 128 * block + block].item() for block in range(4)] == [0x7E] * 4  # 448
    assert packed[0, :512].count_nonzero() == 4
    assert packed[0, 512:528].view(torch.float32).tolist() == [1.0, 2.0, 0.125, 1.0]
    assert packed[0, 528:].view(torch.bfloat16).tolist() == rows[0, 512:].tolist()


@pytest.mark.parametrize("rank", [96, 160, 192, 448, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_bounded_by_the_block_maximum(rank, dtype):
    """Half a step of three mantissa bits: 2^-4 of the value, or half the smallest subnormal, 2^-10 of amax/448.

    The float32 scale and quotient add a few 2^-24.
    """
    rows = random_rows(50, rank, 32).to(dtype)
    back = dequantize_latent(quantize_latent(rows, rank), rank, 32, torch.float64)
    latent = rows[:, :rank].double()
    scale = torch.stack([block.abs().amax(-1) / 448 for block in latent.split(128, dim=-1)], dim=-1)
    scale = scale.repeat_interleave(128, dim=-1)[:, :rank]
    bound = torch.maximum(latent.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)
    assert ((back[:, :rank] - latent).abs() <= bound).all()
    assert torch.equal(back[:, rank:], rows[:, rank:].bfloat16().double())


def as_e4m3(values: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """float64 values kept with one scale, saturating as hardware converts."""
    return (values / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale


def relative_error(approximation: torch.Tensor, exact: torch.Tensor) -> float:
    return ((approximation - exact).norm() / exact.norm()).item()


# e4m3 rounds normal numbers to 2^-4 at worst, which is between 2 and 3 % in the mean square.
E4M3_ERROR = 0.03


def test_an_outlier_channel_costs_the_other_blocks_nothing():
    """10^5 times the rest: one scale for the tensor leaves the rest a few subnormal levels."""
    rows = random_rows(200, 512, 64)
    rows[:, 5] *= 1e5
    latent, others = rows[:, :512].double(), slice(128, 512)
    per_tensor = as_e4m3(latent, latent.abs().max() / 448)
    per_block = dequantize_latent(quantize_latent(rows, 512), 512, 64, torch.float64)
    block_error = relative_error(per_block[:, others], latent[:, others])
    assert block_error < E4M3_ERROR
    assert relative_error(per_tensor[:, others], latent[:, others]) > 10 * block_error


def test_an_outlier_channel_is_kept_itself():
    """10^3 times the rest: a cache with the fixed scale 1 saturates it."""
    rows = random_rows(200, 512, 64)
    rows[:, 5] *= 1e3
    latent = rows[:, :512].double()
    per_block = dequantize_latent(quantize_latent(rows, 512), 512, 64, torch.float64)[:, :512]
    block_error = relative_error(per_block[:, 5], latent[:, 5])
    assert block_error < E4M3_ERROR
    assert relative_error(as_e4m3(latent, 1.0)[:, 5], latent[:, 5]) > 20 * block_error
    # Its neighbours in the block are 10^3 below its scale, still normal numbers of the format.
    assert relative_error(per_block[:, 6:128], latent[:, 6:128]) < E4M3_ERROR


def test_a_token_of_outliers_costs_no_other_token():
    rows = random_rows(8, 128, 16)
    loud = rows.clone()
    loud[3] *= 1e6
    kept = torch.arange(8) != 3
    assert torch.equal(quantize_latent(loud, 128)[kept], quantize_latent(rows, 128)[kept])


def test_zeros_have_scale_one():
    packed = quantize_latent(torch.zeros(2, 160 + 32), 160)
    assert packed[:, 160:168].contiguous().view(torch.float32).tolist() == [[1.0, 1.0]] * 2
    assert not dequantize_latent(packed, 160, 32).any()


@pytest.mark.parametrize("amax", [1e-44, 1e-39, 1e-36, 3e38])
def test_the_smallest_and_largest_blocks_stay_finite(amax):
    """No scale is subnormal: a device that flushes those would read back zeros or infinities."""
    rows = torch.zeros(1, 128 + 16)
    rows[0, :128] = amax
    packed = quantize_latent(rows, 128)
    scale = packed[:, 128:132].view(torch.float32).item()
    assert scale >= torch.finfo(torch.float32).tiny
    back = dequantize_latent(packed, 128, 16)
    assert (back[:, :128] - amax).abs().max() <= max(2**-4 * amax, 2**-10 * scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_read_back_as_nan(bad):
    rows = random_rows(3, 256, 16)
    rows[1, 130] = bad
    packed = quantize_latent(rows, 256)
    assert ((packed[:, :256] & 0x7F) != 0x7F).all(), "a NaN code is left"
    scales = packed[:, 256:264].contiguous().view(torch.float32)
    assert scales.isnan().tolist() == [[False, False], [False, True], [False, False]]
    back = dequantize_latent(packed, 256, 16)
    assert back[1, 128:256].isnan().all()
    assert back[1, :128].isfinite().all()
    assert back[[0, 2]].isfinite().all()


def test_leading_dimensions_strides_and_empty_batches():
    rows = random_rows(24, 96, 16)
    packed = quantize_latent(rows, 96)
    assert torch.equal(quantize_latent(rows.view(2, 3, 4, -1), 96).view(24, -1), packed)
    strided = torch.zeros(24, 300)[:, :112].copy_(rows)
    assert torch.equal(quantize_latent(strided, 96), packed)
    padded = torch.zeros(24, 150, dtype=torch.uint8)[:, :144].copy_(packed)
    assert torch.equal(dequantize_latent(padded, 96, 16), dequantize_latent(packed, 96, 16))
    assert quantize_latent(rows[:0], 96).shape == (0, 144)
    assert dequantize_latent(packed[:0], 96, 16).shape == (0, 112)


def test_output_dtype():
    packed = quantize_latent(random_rows(4, 128, 16), 128)
    exact = dequantize_latent(packed, 128, 16, torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        back = dequantize_latent(packed, 128, 16, dtype)
        assert back.dtype == dtype
        torch.testing.assert_close(back.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(("rank", "rope_dim"), [(100, 64), (0, 64), (512, 63), (512, 0)])
def test_sizes_without_a_row_are_refused(rank, rope_dim):
    with pytest.raises(UnsupportedShapeError):
        fp8_layout(rank, rope_dim)


def test_wrong_rows_are_refused():
    with pytest.raises(InvalidInputError, match="656 bytes"):
        dequantize_latent(torch.zeros(2, 640, dtype=torch.uint8), 512, 64)
    with pytest.raises(InvalidInputError, match=r"torch\.int8"):
        dequantize_latent(torch.zeros(2, 656, dtype=torch.int8), 512, 64)
    with pytest.raises(InvalidInputError, match=r"torch\.int64"):
        quantize_latent(torch.zeros(2, 576, dtype=torch.long), 512)
