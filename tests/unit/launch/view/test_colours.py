"""Test the colours of the page: texts have a contrast of 4.5 in both themes, and lines one of 3."""

import re

import pytest

from launch.view.server import ASSETS

CSS = (ASSETS / "app.css").read_text()
THEMES = {
    name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for name, block in zip(
        ("light", "dark"), re.findall(r":root(?:\.dark)? \{(.*?)\}", CSS, re.DOTALL), strict=True
    )
}
PAIRS = [
    ("front", "back"), ("soft", "back"), ("link", "back"), ("front", "panel"), ("soft", "panel"), ("link", "panel"),
    ("alarm", "alarm-back"), ("alarm", "back"), ("advice", "advice-back"),
]  # fmt: skip


def luminance(colour):
    """Return the relative luminance of a colour, WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_measure_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("front", "back"), PAIRS)
def test_texts_can_be_read(theme, front, back):
    assert contrast(THEMES[theme][front], THEMES[theme][back]) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
def test_lines_stand_out(theme):
    # 3 is what the standard asks of graphics.
    for name, colour in THEMES[theme].items():
        if re.fullmatch(r"c\d|wait|sample|tool|update|publish", name):
            assert contrast(colour, THEMES[theme]["back"]) >= 3.0, name
