"""The page of bft-inspect in headless Chromium: by pointer, by keyboard, on a small screen, light and dark.

As a program it takes the picture in the docs: `python tests/test_inspect_page.py outputs/look/inspect.html docs/images/inspect.png`.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HOSTILE = "</script><script>alert(1)</script>&amp;<img src=x>\n"
WORDS = [
    "Once",
    " upon",
    " a",
    " time",
    HOSTILE,
    " there",
    " was",
    "\n",
    " a",
    " <b>",
    " girl",
    " named",
    " Lily",
    ".",
] * 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium: the system's, or else the one that playwright has downloaded.

    Raises:
        FileNotFoundError: There is none.
        ImportError: There is no playwright.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
        found = found or playwright.chromium.executable_path
        if not Path(found).exists():
            raise FileNotFoundError("no Chromium: apt-get install chromium, or playwright install chromium")
        # In a container root has no sandbox to put its pages in; they are ours, and there is no network behind them.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Skips where there is no browser to drive."""
    opened = chromium()
    try:
        found = opened.__enter__()
    except (ImportError, FileNotFoundError) as error:
        pytest.skip(str(error))
    yield found
    opened.__exit__(None, None, None)


@pytest.fixture(scope="module")
def looks(tiny_llama: Any) -> list[Any]:
    """A look at two texts, weights of the last 30 tokens kept."""
    import torch

    import bft_hf
    from bft_hf.recipes.inspection.look import look
    from bft_hf.recipes.inspection.texts import Text

    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit())
    draws = torch.Generator().manual_seed(0)
    texts = [
        Text(name, torch.randint(3, 128, (len(words),), generator=draws).tolist(), words, parts, False)
        for name, words, parts in (
            ("first", WORDS, ["prompt"] * 20 + ["gold passage"] * 18 + ["answer"] * 4),
            ("<i>second</i>", WORDS[:12], ["text"] * 12),
        )
    ]
    return [look(model, text, 30) for text in texts]


@pytest.fixture
def page(browser: Any, looks: list[Any], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened; it may say nothing on the console and ask for nothing but itself."""
    from playwright.sync_api import expect

    from bft_hf.recipes.inspection.page import page as make_page

    options = {"viewport": {"width": 1200, "height": 800}, **getattr(request, "param", {})}
    path = tmp_path / "inspect.html"
    path.write_text(make_page(looks, {"model": "tiny", "patched_here": True, "command": f"bft-inspect {HOSTILE}"}))
    context = browser.new_context(**options)
    found = context.new_page()
    said: list[str] = []
    found.on("console", lambda message: said.append(message.text))
    found.on("pageerror", lambda error: said.append(str(error)))
    found.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    found.on("request", lambda asked: said.append(asked.url) if asked.url != path.as_uri() else None)
    found.goto(path.as_uri())
    expect(found.get_by_role("status")).not_to_be_empty()
    yield found
    context.close()
    assert said == []


def token(page: Any, place: int) -> Any:
    return page.locator('[role="listbox"]:visible [role="option"]').nth(place)


def status(page: Any) -> str:
    return page.get_by_role("status").inner_text()


def focused(page: Any) -> int:
    """The place of the focused token, which is the one selected and the only one that Tab reaches."""
    return page.evaluate(
        """() => {
          const options = [...document.activeElement.parentElement.children];
          const place = options.indexOf(document.activeElement);
          const marked = options.filter((option) => option.tabIndex === 0 || option.ariaSelected === "true");
          return marked.length === 1 && marked[0] === options[place] ? place : -1;
        }"""
    )


def numbers(text: str) -> dict[str, float]:
    return {
        name: float(value) for name, value in re.findall(r"(precision|gain|n|J) (-?[\d.e-]+\d)", text.split("”")[1])
    }


def expected(look: Any, place: int, layer: int, head: int | None) -> dict[str, float]:
    size = look.sample_size[layer, :, place]
    return {
        "precision": look.values["precision"][layer, place],
        "gain": look.values["gain"][layer, place],
        "n": size.mean() if head is None else size[head],
        "J": look.values["jacobian"][layer, place],
    }


def shown_weights(page: Any) -> list[tuple[str, str, float, float]]:
    rows = page.locator("#rows tr").all()
    cells = [[cell.text_content() for cell in row.locator("td").all()] for row in rows]
    return [(key, text, float(before), float(after)) for key, text, before, after in cells]


def test_the_first_token_shown_is_the_one_the_answer_is_read_from(page: Any, looks: list[Any]) -> None:
    assert status(page).startswith("Token 38 of 42, “ <b>”, gold passage: ")
    assert numbers(status(page)) == pytest.approx(expected(looks[0], 37, 2, None), rel=6e-3)
    assert page.get_by_role("listbox", name="Tokens of first").get_by_role("option").count() == 42
    assert token(page, 37).evaluate("option => option.classList.contains('gold')")


def test_hostile_text_is_shown_as_text(page: Any) -> None:
    assert token(page, 4).text_content() == HOSTILE.replace("\n", "\u21b5\n")
    assert page.locator("img").count() == 0
    page.get_by_text("What the numbers mean").click()
    assert HOSTILE.strip() in page.locator("details code").inner_text()


def test_the_pointer_shows_a_token_and_leaving_it_the_focused_one(page: Any, looks: list[Any]) -> None:
    token(page, 30).click()
    assert focused(page) == 30 and status(page).startswith("Token 31 of 42")
    token(page, 19).hover()
    assert status(page).startswith("Token 20 of 42, “ there”, prompt")
    assert numbers(status(page)) == pytest.approx(expected(looks[0], 19, 2, None), rel=6e-3)
    assert focused(page) == 30
    page.get_by_role("heading", name="A look inside tiny").hover()
    assert status(page).startswith("Token 31 of 42")


def test_arrow_keys_move_the_token(page: Any) -> None:
    token(page, 37).click()
    for key, place in (("ArrowRight", 38), ("ArrowLeft", 37), ("ArrowLeft", 36), ("End", 41), ("ArrowRight", 41)):
        page.keyboard.press(key)
        assert focused(page) == place, key
        assert status(page).startswith(f"Token {place + 1} of 42")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert focused(page) == 0
    # A line down and up: the next line begins behind the line break of token 5.
    page.keyboard.press("ArrowDown")
    below = focused(page)
    assert token(page, below).bounding_box()["y"] > token(page, 0).bounding_box()["y"]
    page.keyboard.press("ArrowUp")
    assert focused(page) == 0
    page.keyboard.press("ArrowUp")
    assert focused(page) == 0


def test_everything_is_reached_by_tab(page: Any) -> None:
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(7):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.getAttribute('role') || document.activeElement.localName"
            )
        )
    assert reached[:6] == ["text", "measure", "layer", "head", "option", "weights"]
    assert reached[6] == "summary"


@pytest.mark.parametrize("head", [None, 2])
def test_layer_and_head_are_picked_by_keyboard(page: Any, looks: list[Any], head: int | None) -> None:
    token(page, 40).click()
    before = shown_weights(page)
    page.get_by_label("Layer").focus()
    page.keyboard.press("1")
    if head is not None:
        page.get_by_label("Head, of n and the weights").focus()
        page.keyboard.type(str(head))
    assert numbers(status(page)) == pytest.approx(expected(looks[0], 40, 1, head), rel=6e-3)
    shown = shown_weights(page)
    assert shown != before
    row = (1, 0 if head is None else 1 + head, 40 - looks[0].first)
    keys, alpha, kriging = (values[row] for values in (looks[0].keys, looks[0].before, looks[0].after))
    order = sorted(range(len(keys)), key=lambda place: -kriging[place])
    assert [int(key) - 1 for key, *_ in shown[:-1]] == [int(keys[place]) for place in order]
    np.testing.assert_allclose([line[2] for line in shown[:-1]], alpha[order], atol=6e-4)
    np.testing.assert_allclose([line[3] for line in shown[:-1]], kriging[order], atol=6e-4)
    assert [line[1] for line in shown[:-1]] == [WORDS[keys[place]].replace("\n", "\u21b5\n") for place in order]
    assert shown[-1][1] == f"{41 - len(keys)} others"
    for column in (2, 3):
        assert sum(line[column] for line in shown) == pytest.approx(1, abs=8e-3)
    name = "mean of all" if head is None else str(head)
    assert page.locator("#caption").inner_text() == f"From token 41, layer 1, head {name}"


def test_the_measure_shades_the_tokens(page: Any, looks: list[Any]) -> None:
    shades = {}
    for place, (name, label) in enumerate((("precision", "precision"), ("gain", "gain"), ("jacobian", "J"))):
        page.get_by_label("Shade by").select_option(index=(0, 1, 3)[place])
        shades[name] = np.array(
            [float(token(page, number).evaluate("o => o.style.getPropertyValue('--a')")) for number in range(42)]
        )
        values = looks[0].values[name][2]
        inside = (values > np.quantile(values, 0.05)) & (values < np.quantile(values, 0.95))
        scale = np.log if name == "precision" else np.asarray
        assert np.corrcoef(shades[name][inside], scale(values)[inside])[0, 1] > 0.999
        assert label in page.locator("#scale").inner_text()
        assert float(page.locator("#low").inner_text()) <= float(page.locator("#high").inner_text())
    page.get_by_label("Shade by").select_option(label="effective sample size n")
    assert "n, on a log scale" in page.locator("#scale").inner_text()
    page.get_by_label("Head, of n and the weights").select_option(label="3")
    values = np.log(looks[0].sample_size[2, 3])
    shade = np.array(
        [float(token(page, number).evaluate("o => o.style.getPropertyValue('--a')")) for number in range(42)]
    )
    assert np.corrcoef(shade[2:-2], values[2:-2])[0, 1] > 0.99


def test_tokens_without_weights_say_so(page: Any) -> None:
    token(page, 11).click()
    assert (
        page.locator("#no-weights").inner_text()
        == "Weights are kept for the last 30 of 42 tokens: --weight_tokens 42 keeps all."
    )
    assert not page.locator("#weights").is_visible()
    token(page, 12).click()
    assert page.locator("#weights").is_visible() and not page.locator("#no-weights").is_visible()


def test_another_text_is_picked(page: Any, looks: list[Any]) -> None:
    from playwright.sync_api import expect

    page.get_by_role("combobox", name="Text", exact=True).select_option(label="<i>second</i>")
    expect(page.get_by_role("status")).to_contain_text("of 12")
    assert page.get_by_role("listbox").count() == 1
    assert numbers(status(page)) == pytest.approx(expected(looks[1], 11, 2, None), rel=6e-3)
    token(page, 3).click()
    assert "others" not in shown_weights(page)[-1][1] and len(shown_weights(page)) == 4


SMALL = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}


@pytest.mark.parametrize("page", [SMALL, {**SMALL, "color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_a_small_screen_holds_the_page(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    token(page, 33).tap()
    assert status(page).startswith("Token 34 of 42")
    for part in ("#measure", "#layer", "#head", "#status", "#weights"):
        box = page.locator(part).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360, part


@pytest.mark.parametrize(
    "page", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"]
)
def test_text_can_be_read_on_its_shade(page: Any) -> None:
    ratio = page.evaluate(
        """() => {
          const channels = (text) => text.match(/[\\d.]+/g).map(Number);
          const luminance = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, share, place) => {
            const value = rgb[place] / 255;
            return sum + share * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
          }, 0);
          const options = [...document.querySelectorAll('[role="option"]')];
          const most = options.find((option) => option.style.getPropertyValue("--a") === "1.000");
          const lights = [getComputedStyle(most).backgroundColor, getComputedStyle(most).color].map((text) => luminance(channels(text)));
          const body = [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector(".quiet")).color];
          const others = body.map((text) => luminance(channels(text)));
          return [lights, others].map((pair) => (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05));
        }"""
    )
    assert min(ratio) >= 4.5


def picture(path: Path, target: Path) -> None:
    """A picture of a page, shaded by gain, with the token that the answer is read from."""
    from playwright.sync_api import expect

    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1180, "height": 880})
        page.goto(path.resolve().as_uri())
        expect(page.get_by_role("status")).not_to_be_empty()
        page.get_by_label("Shade by").select_option(label="gain")
        page.screenshot(path=target)


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
