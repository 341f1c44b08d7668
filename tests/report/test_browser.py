"""The report in a real browser, without a network: Chromium, where one is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from mla_convert.report import write_report
from tests.report.samples import details, healed, record, write_folder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

WIDTH, HEIGHT = 900, 1400
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--window-size={WIDTH},{HEIGHT}"),
)
SCHEMES = {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}


@dataclass(frozen=True)
class Seen:
    """What a browser made of a page.

    Attributes:
        console: lines that the page wrote to the console, errors and refusals of its policy among them.
        requested: addresses that the page asked for.
        pixels: [height, width, 4], from 0 to 1.
    """

    console: list[str]
    requested: set[str]
    pixels: object


def look(page: Path, scheme: str, folder: Path) -> Seen:
    """Open a page and return what was seen."""
    from matplotlib.image import imread

    picture, log = folder / f"{page.stem}-{scheme}.png", folder / f"{page.stem}-{scheme}.netlog"
    places = (f"--screenshot={picture}", f"--log-net-log={log}", f"--user-data-dir={folder / 'profile'}")
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, *SCHEMES[scheme], *places, page.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    asked = (event.get("params", {}) for event in json.loads(log.read_text())["events"])
    # What the browser asks for on its own has no page as its initiator.
    requested = {
        params["url"]
        for params in asked
        if "url" in params and params.get("initiator", "").startswith(("file", "null"))
    }
    return Seen(console, requested, imread(picture))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    made = healed(record(layers=30, groups=3, head_dim=64))
    folder = write_folder(tmp_path_factory.mktemp("browser") / "model", made)
    write_report(folder, details(made))
    return folder / "report.html"


def mean_brightness(seen: Seen) -> float:
    return float(seen.pixels[..., :3].mean())  # type: ignore[index]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_asks_for_nothing_and_complains_of_nothing(page, scheme, tmp_path) -> None:
    seen = look(page, scheme, tmp_path)
    assert seen.console == []
    assert {address for address in seen.requested if not address.startswith("file:")} == set()
    # a page of text: mostly its ground
    assert mean_brightness(seen) > 0.85 if scheme == "light" else mean_brightness(seen) < 0.25


def test_a_page_that_does_ask_and_complain_is_caught(tmp_path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<!DOCTYPE html><img src="http://elsewhere.example/a.png"><script>nothing()</script>')
    seen = look(bad, "light", tmp_path)
    assert "http://elsewhere.example/a.png" in seen.requested
    assert any("nothing is not defined" in line for line in seen.console)


def test_what_would_be_loaded_from_a_report_is_refused_by_its_policy(page, tmp_path) -> None:
    changed = tmp_path / "changed.html"
    html = page.read_text(encoding="utf-8")
    changed.write_text(html.replace("<main>", '<main><img src="http://elsewhere.example/a.png">'), encoding="utf-8")
    seen = look(changed, "light", tmp_path)
    assert any("Content Security Policy" in line for line in seen.console)


def test_colours_reach_the_plots_in_both_schemes(page, tmp_path) -> None:
    """The first series' colour, which only plots have, is on the page."""
    for scheme, colour in (("light", (0x00, 0x72, 0xB2)), ("dark", (0x56, 0xB4, 0xE9))):
        pixels = look(page, scheme, tmp_path).pixels
        near = (abs(pixels[..., :3] * 255 - colour) < 3).all(-1)  # type: ignore[index]
        assert near.sum() > 300
