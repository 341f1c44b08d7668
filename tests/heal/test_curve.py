import json

import pytest

from mla_convert.errors import OutputError
from mla_convert.heal.curve import CurvePoint, write_curve

CURVE = (
    CurvePoint(0, 0, None, 0.0, 0.5),
    CurvePoint(1, 16, 0.4, 1e-3),
    CurvePoint(2, 32, 0.25, 5e-4, 0.125),
)


def test_a_line_a_point(tmp_path):
    write_curve(tmp_path, CURVE)
    lines = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0] == {"step": 0, "tokens": 0, "loss": None, "learning_rate": 0.0, "held_out": 0.5}
    assert [CurvePoint(**line) for line in lines] == list(CURVE)


@pytest.mark.parametrize("curve", [CURVE, CURVE[:1], (), (CurvePoint(0, 0, None, 0.0, 0.0),)], ids=len)
def test_a_picture(tmp_path, curve):
    write_curve(tmp_path, curve)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OutputError, match="loss curve"):
        write_curve(tmp_path / "missing", CURVE)
