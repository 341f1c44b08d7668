"""The report as a page: what it shows, that it loads nothing, and that it can be read."""

import re

import pytest

from mla_convert.report.data import ReportData
from mla_convert.report.writing import render
from tests.report.reading import Element, read, variables
from tests.report.samples import details, healed, record


def page(made, *, known=True, **fields) -> str:
    return render(ReportData(made, details(made) if known else None, **fields), "folder")


@pytest.fixture(scope="module")
def html() -> str:
    made = healed(record(layers=30, groups=3, head_dim=64))
    return page(made, training_loss=tuple((float(i), 0.5 / i) for i in range(1, 201)))


@pytest.fixture(scope="module")
def parsed(html) -> Element:
    return read(html)


def section(parsed: Element, name: str) -> Element:
    return next(one for one in parsed.all("section") if one.attributes["id"] == name)


def test_all_that_is_known_has_a_section(parsed) -> None:
    names = [one.attributes["id"] for one in parsed.all("section")]
    healing = ["healing-0-layers", "healing-0-global"]
    first = ["source", "quality", "sizes", "spectra", "slots", "errors"]
    assert names == [*first, *healing, "timings", "verification", "recipe", "versions"]
    links = [one.attributes["href"] for one in parsed.all("nav")[0].all("a")]
    assert links == [f"#{name}" for name in names]


def test_nothing_is_loaded(html, parsed) -> None:
    elements = parsed.everything()
    assert {one.tag for one in elements}.isdisjoint({"script", "link", "img", "image", "iframe", "object", "embed"})
    loading = ("href", "src", "xlink:href", "srcset", "action", "data", "poster", "background")
    targets = {one.attributes[name] for one in elements for name in loading if name in one.attributes}
    assert {target for target in targets if not target.startswith("#")} == set()
    assert not re.search(r"@import|url\((?!#)", html)
    policy = next(one for one in parsed.all("meta") if one.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_ids_are_unique_and_references_lead_somewhere(html, parsed) -> None:
    ids = [one.attributes["id"] for one in parsed.everything() if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    referred = {
        target.removeprefix("#")
        for one in parsed.everything()
        for name in ("href", "xlink:href", "aria-labelledby")
        for target in one.attributes.get(name, "").split()
    }
    assert referred | set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)


def test_every_plot_has_a_name_a_description_and_its_numbers(parsed) -> None:
    plots = [one for one in parsed.all("section") if one.all("svg")]
    assert len(plots) == 7
    for one in plots:
        svg = one.all("svg")[0]
        assert svg.attributes["role"] == "img"
        assert svg.all("title")[0].said()
        assert svg.all("desc")[0].said()
        assert len(one.all("details")[0].all("table")[0].cells()) > 1


def test_every_colour_is_the_pages_and_is_there_in_light_and_dark(html, parsed) -> None:
    palettes = variables(parsed.all("style")[0].text)
    used = set(re.findall(r"var\(--([\w-]+)\)", html))
    assert used <= palettes["light"].keys()
    assert palettes["light"].keys() == palettes["dark"].keys()
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        assert not re.search(r"(?:fill|stroke): #", svg)


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_what_wcag_asks_of_text_and_of_graphics(parsed, scheme) -> None:
    colours = variables(parsed.all("style")[0].text)[scheme]
    for name, colour in colours.items():
        if name in ("page", "panel", "grid", "cell"):
            continue
        text = name in ("ink", "muted", "link")
        least = 4.5 if text else 3.0
        for ground in ("page", "panel") if text else ("page",):
            pair = sorted((luminance(colour), luminance(colours[ground])))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, f"{name} on {ground}"


def test_the_numbers_are_those_of_the_record(parsed) -> None:
    made = record(layers=30, groups=3, head_dim=64)
    rows = section(parsed, "errors").all("table")[0].cells()
    assert len(rows) == 31
    shown = [float(cell) for cell in rows[8][1:]]
    # four digits are shown
    assert shown == pytest.approx([*made["layer_errors"][7].values(), made["dampings"][7]], rel=1e-3)
    measured = section(parsed, "quality").all("table")[0].cells()
    assert measured[1][:3] == ["corpus/wiki.txt", "512", "30,660"]
    assert [row[5] for row in measured[1:]] == ["0.1178", "0.1861"]
    kept = [row[1:3] for row in section(parsed, "healing-0-global").all("table")[0].cells()]
    assert kept == [["KL, nats a token"], ["0.4"], ["0.22"], ["0.18"]]


def test_slots_are_listed_as_often_as_they_are_there(parsed) -> None:
    rows = section(parsed, "slots").all("table")[0].cells()[1:]
    for row, layer in zip(rows, details(record(layers=30, groups=3, head_dim=64)).layers, strict=True):
        listed = [part.split(" ×") for part in row[2].split(", ")]
        assert int(row[1]) == sum(int(part[1]) if len(part) > 1 else 1 for part in listed) == sum(layer.slots)


def test_the_ranks_of_the_spectra_lose_no_more_than_they_say(parsed) -> None:
    layers = details(record(layers=30, groups=3, head_dim=64)).layers
    for row, layer in zip(section(parsed, "spectra").all("table")[0].cells()[1:], layers, strict=True):
        lost = dict(zip(layer.ranks, layer.lost, strict=True))
        assert [lost[int(cell)] <= share for cell, share in zip(row[3:], (0.1, 0.01, 0.001), strict=True)] == [True] * 3


def test_what_a_user_named_is_text_and_never_markup() -> None:
    bad = '</title><script>alert(1)</script>"&`<b>`'
    made = record(ref=bad)
    made["measurements"][0]["text"] = bad
    made["notes"] = [bad]
    parsed = read(page(made))
    assert parsed.all("script") == []
    assert parsed.all("b") == []
    assert bad in parsed.all("section")[0].said()


def test_the_same_data_gives_the_same_page(html) -> None:
    made = healed(record(layers=30, groups=3, head_dim=64))
    again = page(made, training_loss=tuple((float(i), 0.5 / i) for i in range(1, 201)))
    assert again == html


def test_the_page_is_small(html) -> None:
    assert len(html.encode()) < 400_000


@pytest.mark.slow
def test_the_page_of_a_large_model_is_not_large() -> None:
    assert len(page(healed(record(layers=128, groups=64, head_dim=128))).encode()) < 2_000_000


def test_a_model_of_one_layer() -> None:
    read(page(record(layers=1)))


def test_what_is_not_known_is_left_out() -> None:
    made = record(measured=False)
    made |= {"layer_errors": [], "dampings": [], "timings": {}, "verification": None, "reading_difference": None}
    parsed = read(page(made, known=False))
    assert [one.attributes["id"] for one in parsed.all("section")] == [
        *("source", "quality", "sizes", "verification", "recipe", "versions")
    ]
    assert "evaluate" in section(parsed, "quality").said()


def test_errors_that_are_missing_in_some_layers_leave_gaps() -> None:
    made = record(layers=3)
    made["layer_errors"] = [{"keys": 0.1}, {"keys": None}, {"keys": 0.2, "attention": 0.3}]
    rows = section(read(page(made)), "errors").all("table")[0].cells()
    assert [row[1:3] for row in rows[1:]] == [["0.1", "–"], ["–", "–"], ["0.2", "0.3"]]


def test_sizes_that_differ_by_layer_are_shown_as_a_range() -> None:
    made = record(layers=3)
    made["plan"]["layers"][1]["kv_rank"] = 99
    facts = dict(section(read(page(made)), "source").all("table")[0].cells())
    assert facts["latent rank C"] == "16 to 99"
