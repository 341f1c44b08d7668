"""The report of a folder: written, written again, and written from less than all."""

import json
import logging

import pytest

from mla_convert.errors import SourceError
from mla_convert.record import add_measurement
from mla_convert.report import write_report
from tests.report.samples import details, healed, record, write_folder


def test_the_files_hold_the_same_data(tmp_path) -> None:
    made = healed(record())
    write_report(write_folder(tmp_path, made), details(made))
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["conversion"] == made
    assert [layer["slots"] for layer in data["details"]["layers"]] == [list(one.slots) for one in details(made).layers]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("conversion.json", "loss.jsonl", "report.html", "report.json")
    ]


def test_a_report_written_again_keeps_what_only_the_conversion_knew(tmp_path) -> None:
    made = record(measured=False)
    write_report(write_folder(tmp_path, made), details(made))
    before = json.loads((tmp_path / "report.json").read_text())["details"]
    row = {"text": "a.txt", "context": 64, "tokens": 640, "source_perplexity": 20.0, "perplexity": 25.0}
    add_measurement(tmp_path, row | {"log_ratio": 0.223, "kl": 0.2, "top1_agreement": 0.7})
    write_report(tmp_path)
    after = json.loads((tmp_path / "report.json").read_text())
    assert after["details"] == before
    assert after["conversion"]["measurements"][0]["perplexity"] == 25.0
    assert "+0.223" in (tmp_path / "report.html").read_text()


def test_a_folder_of_an_earlier_version_shows_its_slots(tmp_path) -> None:
    made = record(layers=2)
    write_folder(tmp_path, made)
    (tmp_path / "config.json").write_text(json.dumps({"rope_inv_freq": [[1.0, 0.1, 0.1], [0.01, 0.0]]}))
    write_report(tmp_path)
    kept = json.loads((tmp_path / "report.json").read_text())["details"]
    assert kept["frequencies"] == [[1.0, 0.1, 0.01]]  # what does not turn has no slot
    assert [layer["slots"] for layer in kept["layers"]] == [[1, 2, 0], [0, 0, 1]]
    assert 'id="spectra"' not in (tmp_path / "report.html").read_text()


def test_training_losses_are_means_that_keep_the_mean(tmp_path) -> None:
    made = healed(record())
    write_folder(tmp_path, made)
    losses = [1.0 / (i + 1) for i in range(1000)]
    lines = [json.dumps({"step": i + 1, "loss": loss}) + "\n" for i, loss in enumerate(losses)]
    (tmp_path / "loss.jsonl").write_text('{"step": 0, "loss": null}\n' + "".join(lines))
    write_report(tmp_path)
    points = json.loads((tmp_path / "report.json").read_text())["training_loss"]
    assert len(points) == 200
    # 1000 steps in 200 means of five each
    assert sum(loss for _, loss in points) / 200 == pytest.approx(sum(losses) / 1000)
    assert [points[0][0], points[-1][0]] == [3.0, 998.0]


def test_spectra_that_cannot_be_read_are_left_out_with_a_warning(tmp_path, caplog) -> None:
    write_folder(tmp_path, record())
    (tmp_path / "report.json").write_text('{"details": {"layers": 3}}')
    with caplog.at_level(logging.WARNING):
        write_report(tmp_path)
    assert "without what" in caplog.text
    assert json.loads((tmp_path / "report.json").read_text())["details"] is None


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": "native"}'])
def test_a_folder_without_a_record(tmp_path, content) -> None:
    if content is not None:
        (tmp_path / "conversion.json").write_text(content)
    with pytest.raises(SourceError, match=r"conversion\.json"):
        write_report(tmp_path)


def test_a_record_that_lacks_what_every_conversion_has(tmp_path) -> None:
    made = record()
    del made["plan"]["cache"]
    with pytest.raises(SourceError, match="cannot be shown: KeyError: 'cache'"):
        write_report(write_folder(tmp_path, made))
