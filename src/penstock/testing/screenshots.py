"""Pictures of the page: every page at two widths, light and dark, and those that the docs show.

    python -m penstock.testing.screenshots FROM TO

copies what the documentation shows (`SHOWN`) from the folder that tests/browser/test_pictures.py
has filled. `make screenshots` does both. What a picture must show before it is taken, and what is
wrong with one, is here too.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

# Each page, and what it has when it shows something.
PAGES = {
    "chat": "[data-figures]",
    "memory": ".timeline",
    "models": ".model.ready .figures",
    "requests": ".requests tbody tr",
    "cache": ".cache .stacked",
    "bench": ".bars",
    "events": ".event-list li",
    "settings": ".setting",
}
# Each width: the height of the window, and the most for a page that is pictured as a whole.
SIZES = {1280: (800, 1500), 390: (844, 1500)}
_LONG = ("settings", "events")  # lists of which the beginning says enough
THEMES = ("light", "dark")
SHOWN = (
    *(f"{name}-1280-light" for name in ("memory", "models", "cache", "settings")),
    *(f"{name}-1280-dark" for name in ("chat", "requests", "bench", "events")),
    *(f"{name}-390-light" for name in ("memory", "chat", "models")),
    *(f"{name}-390-dark" for name in ("requests", "settings")),
)
MOST_BYTES = 70_000  # of a picture that is shown
_QUALITY = 74
# Elements whose text has less contrast with what is behind it than WCAG 2.2 asks for (level AA),
# those whose text is cut off without three dots that say so, and controls without a name.
_FAULTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const faults = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.nodeValue.trim());
    const seen = node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!own || !seen) continue;
    if (node.matches(":disabled, .none, option, .unseen, .unseen *, svg *")) continue;
    const style = getComputedStyle(node);
    const [one, two] = [light(rgba(style.color)), light(behind(node))];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    const words = node.textContent.trim().slice(0, 40);
    const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    if (ratio < least) faults.push(`contrast ${ratio.toFixed(2)}: ${words}`);
    const cut = node.scrollWidth > node.clientWidth + 1 && style.overflowX === "hidden";
    if (cut && style.textOverflow !== "ellipsis") faults.push(`cut off: ${words}`);
  }
  for (const field of document.querySelectorAll("input")) {
    const text = field.value || field.placeholder;
    if (field.type === "search" || !text || !field.checkVisibility()) continue;
    canvas.font = getComputedStyle(field).font;
    const room = field.clientWidth - 12;
    if (canvas.measureText(text).width > room && !field.value) faults.push(`cut off: ${text}`);
  }
  for (const node of document.querySelectorAll("button, input, select, textarea, a[href]")) {
    const words = node.textContent.trim() || node.getAttribute("aria-label");
    if (!words && !node.labels?.length) faults.push(`no name: ${node.outerHTML}`);
  }
  return faults;
}"""


@dataclass(frozen=True, slots=True)
class Look:
    """How wide a window is, and its colours."""

    width: int
    theme: str

    def context(self, browser: Browser) -> BrowserContext:
        """A browser of its own that looks so."""
        return browser.new_context(
            viewport={"width": self.width, "height": SIZES[self.width][0]},
            color_scheme="dark" if self.theme == "dark" else "light",
            reduced_motion="reduce",
        )

    def name(self, page: str) -> str:
        """What a picture of a page is called."""
        return f"{page}-{self.width}-{self.theme}"


def take(page: Page, name: str, look: Look, folder: Path) -> None:
    """A picture of the page that is drawn."""
    least, most = SIZES[look.width]
    whole = page.evaluate("document.documentElement.scrollHeight")
    high = least if name in _LONG else min(max(least, whole), most)
    page.set_viewport_size({"width": look.width, "height": high})
    page.wait_for_timeout(150)
    session = page.context.new_cdp_session(page)
    shot = session.send("Page.captureScreenshot", {"format": "webp", "quality": _QUALITY})
    (folder / f"{look.name(name)}.webp").write_bytes(base64.b64decode(shot["data"]))
    session.detach()
    page.set_viewport_size({"width": look.width, "height": least})


def faults(page: Page) -> list[str]:
    """What one cannot read of the page that is drawn, and by how much it is too wide."""
    over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    found: list[str] = page.evaluate(_FAULTS)
    return [f"{over} pixels too wide", *found] if over > 0 else found


def main() -> None:
    """Copy those that are shown; the others of the folder go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taken", type=Path)
    parser.add_argument("shown", type=Path)
    options = parser.parse_args()
    options.shown.mkdir(parents=True, exist_ok=True)
    for old in options.shown.iterdir():
        old.unlink()
    for name in SHOWN:
        picture = options.taken / f"{name}.webp"
        if (size := picture.stat().st_size) > MOST_BYTES:
            sys.exit(f"{picture} has {size} bytes, and at most {MOST_BYTES} are kept.")
        shutil.copy(picture, options.shown)


if __name__ == "__main__":
    main()
