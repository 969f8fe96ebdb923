"""The report.html of a real run, checked by a strict parser, and in a real browser."""

import random
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

import train

SIZES = (
    "--dim 16 --layers 2 --heads 2 --context 16 --batch-size 4 --tokenizer bytes --device cpu --dtype float32 "
    "--no-fast --lr 0.01 --steps 20 --eval-every 10"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = 380  # CSS pixels
VOID = {"meta", "img", "br", "hr", "link", "input"}  # tags that have no end


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> str:
    """Flags of a tiny run on a text with characters that HTML must escape."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["the", "cat", "<dog>", "sees", "&amp;", "a", "bird", "and", "sings", "sleeps"]
    (folder / "text.txt").write_text("".join(" ".join(draw.choices(words, k=6)) + ".\n" for _ in range(300)))
    return f"{SIZES} --data {folder / 'text.txt'} --cache-dir {folder / 'cache'}"


@pytest.fixture(scope="module")
def report(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train.main(f"{flags} --out {folder}".split())
    return folder / "report.html"


class StrictParser(HTMLParser):
    """Collects tags with their attributes, and insists that every tag ends where it should."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def test_a_page_is_well_formed_and_loads_nothing_from_elsewhere(report):
    html = report.read_text("utf-8")
    parser = StrictParser()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    tags = [tag for tag, _ in parser.tags]
    assert tags.count("h1") == 1 and not {"script", "link", "iframe", "object"} & set(tags)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in parser.tags
    images = [attributes for tag, attributes in parser.tags if tag == "img"]
    assert images and all(str(image["src"]).startswith("data:") and image["alt"] for image in images)
    assert not re.search(r"url\(|@import|@font-face", html)
    assert all(not name.startswith("on") for _, attributes in parser.tags for name in attributes)


# --- in a browser ----------------------------------------------------------------------------------------------------


def browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess:
    """Open a page in a headless browser, with its console on standard error."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}"]
    return subprocess.run(
        [browser, *common, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )


@pytest.mark.slow
def test_a_page_in_a_browser_is_not_blank_and_has_no_errors(report, tmp_path):
    picture = tmp_path / "page.png"
    shown = browse(report, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1000,2000")
    assert "CONSOLE" not in shown.stderr
    pixels = imread(picture)[..., :3].reshape(-1, 3)
    background = (pixels == pixels[0]).all(axis=1).mean()
    assert 0.5 < background < 0.99
    plots = ((pixels.max(axis=1) - pixels.min(axis=1)) > 0.3).mean()  # text is gray, lines have colors
    assert plots > 1e-4


MEASURE = """
const frame = document.querySelector("iframe");
frame.onload = () => {
    const page = frame.contentDocument;
    const wide = [...page.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > frame.clientWidth);
    const scrolling = wide.filter(e => e.closest(".table, pre, figure"));
    const decoded = [...page.images].filter(image => image.complete && image.naturalWidth > 0);
    document.body.textContent = [
        frame.clientWidth, page.documentElement.scrollWidth, wide.length - scrolling.length, scrolling.length,
        page.images.length - decoded.length, parseFloat(getComputedStyle(page.body).fontSize),
    ].join(" ");
};
"""


@pytest.mark.slow
def test_a_page_fits_a_phone(report, tmp_path):
    """In a frame as wide as a phone, only what scrolls in a box of its own is wider, and every plot is decoded."""
    framed = tmp_path / "framed.html"
    srcdoc = escape(report.read_text("utf-8"))
    frame = f'<iframe style="border: 0; width: {PHONE}px" srcdoc="{srcdoc}"></iframe>'
    framed.write_text(f"<!DOCTYPE html><body>{frame}<script>{MEASURE}</script></body>", "utf-8")
    shown = browse(framed, tmp_path / "profile", "--dump-dom")
    (measured,) = re.findall(r"<body>([\d. ]+)</body>", shown.stdout)
    width, page_width, too_wide, scrolling, broken, font_size = map(float, measured.split())
    assert width == PHONE and page_width <= PHONE and too_wide == 0
    assert scrolling > 0 and broken == 0 and font_size >= 16
