"""What the plots draw, as far as it can be read from their SVG."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mla_convert.report.details import LayerDetails
from mla_convert.report.plots import _runs, lines, slots, spectra


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 3))
def test_runs_cover_the_pairs_whose_count_is_in_range_and_no_other(row, low, more) -> None:
    runs = _runs(row, 5, low, low + more)
    covered = [pair for left, right, _, _ in runs for pair in range(left, right)]
    assert covered == [pair for pair, count in enumerate(row) if low <= count <= low + more]
    assert {(top, bottom) for _, _, top, bottom in runs} <= {(5, 6)}
    # neighbours are in one run, or a drawing has a seam between them
    assert all(one[1] < other[0] for one, other in pairwise(runs))


def labels(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_numbers_in_labels_keep_their_digits() -> None:
    svg = lines("a", "t", "d", [("line", [(0.0, 0.1001), (1.0, 0.1003)])], ("x", "y"))
    assert "0.10015" in labels(svg)


def test_wavelengths_are_shown_where_all_layers_share_them() -> None:
    svg = slots([[1, 0], [2, 1]], (0.1, 0.001))
    assert "63" in labels(svg)  # 2π / 0.1
    assert "6,300" in labels(svg)
    assert "63" not in labels(slots([[1, 0], [2, 1]], None))


def test_a_spectrum_that_ends_early_is_drawn_as_far_as_it_goes() -> None:
    layer = LayerDetails.of([1.0, 0.0, 0.0], 2, None, num_pairs=0)
    assert "layer 0" in labels(spectra([layer, layer], [2, 2]))


def test_losses_of_very_different_size_are_on_a_logarithmic_axis() -> None:
    wide = labels(lines("a", "t", "d", [("line", [(0.0, 0.001), (1.0, 100.0)])], ("x", "y")))
    assert {"0.01", "1", "100"} <= set(wide)
