"""The site in a browser: no page is wider than a phone's screen."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="pages were NOT looked at in a browser: apt-get install chromium"),
    pytest.mark.skipif(not shutil.which("mkdocs"), reason="pages were NOT looked at in a browser: mkdocs is not installed"),
]

# Pixels of a phone's screen.
PHONE = 390

# Seconds for the browser.
LIMIT = 240

# Opens each page in a frame as wide as the screen. Notes its width, and what sticks out of it where nothing scrolls or cuts.
LOOK = """<!doctype html><pre id="found"></pre><script>
const screen = SCREEN, found = {};
const cut = (page, element) => {
  for (let each = element; each && each !== page.body; each = each.parentElement)
    if (page.defaultView.getComputedStyle(each).overflowX !== "visible") return true;
  return false;
};
const look = async (address) => {
  const frame = document.createElement("iframe");
  Object.assign(frame.style, { width: `${screen}px`, height: "800px", border: "0" });
  frame.src = address;
  document.body.append(frame);
  await new Promise((loaded) => { frame.onload = loaded; });
  await new Promise((laid_out) => setTimeout(laid_out, 50));
  const page = frame.contentDocument;
  const outside = [...page.querySelectorAll("article *")].filter((each) => each.getBoundingClientRect().right > screen + 1);
  const seen = outside.filter((each) => !cut(page, each)).map((each) => `${each.tagName} ${each.textContent.slice(0, 80)}`);
  const text = page.querySelector("article") ? page.querySelector("article").textContent.length : 0;
  found[address] = { width: page.documentElement.scrollWidth, seen: seen.slice(0, 3), text };
  frame.remove();
};
(async () => {
  for (const page of PAGES) await look(page);
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""


def in_browser(site: Path, pages: list[str]) -> dict[str, Any]:
    """Look at pages of a site in the browser."""
    (site / "look.html").write_text(LOOK.replace("SCREEN", str(PHONE)).replace("PAGES", json.dumps(pages)))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        f"--user-data-dir={site}/profile",
    ]
    words = [str(BROWSER), *options, "--virtual-time-budget=60000", "--dump-dom", f"file://{site}/look.html"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    told = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert told, done.stderr[-2000:]
    return dict(json.loads(html.unescape(told[1])))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(["mkdocs", "build", "--quiet", "--site-dir", folder], cwd=ROOT, env=variables, check=True)
    yield folder


def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    found = in_browser(site, [page for page in pages if not page.startswith("assets")])
    assert len(found) > 30 and all(page["text"] > 100 for page in found.values())
    wide = {name: page for name, page in found.items() if page["width"] > PHONE or page["seen"]}
    assert not wide, json.dumps(wide, indent=1)


def test_a_page_that_is_too_wide_is_found(site: Path) -> None:
    bad = "<!doctype html><body><article><p style='width: 600px'>too wide a paragraph</p></article></body>"
    (site / "bad.html").write_text(bad)
    found = in_browser(site, ["bad.html"])["bad.html"]
    assert found["width"] > PHONE and found["seen"] == ["P too wide a paragraph"]
