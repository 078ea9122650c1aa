"""Takes pictures of pages of the site in a browser, wide and narrow, light and dark, and asks its search.

    mkdocs build --strict && pip install playwright && PYTHONPATH=. python tools/site_pictures.py site pictures

It asks the search for QUERIES and prints where the first answers lead. A page whose content is
wider than the screen, an image that cannot be loaded and a question without an answer are errors.
The browser is the chromium that is installed (`apt install chromium`), or the one named by CHROMIUM.
"""

import argparse
import contextlib
import functools
import http.server
import os
import pathlib
import shutil
import threading
from typing import Any

PAGES = (
    "index", "porting", "faq", "gallery", "masks", "examples", "api", "speed", "block_masks", "pictures", "weights", "files",
)  # fmt: skip
WIDTHS = {"wide": 1300, "phone": 390}
MODES = ("light", "dark")
QUERIES = {
    "window": "masks",
    "sliding_window": "masks",
    "flex_attention": "api",
    "rope": "",
    "gqa": "",
    "mla": "",
    "varlen": "",
    "nan": "",
    "memory": "",
    "debugging": "",
    "page_table": "api",
}
"""What is typed into the search, and a part of the address of one of the first answers."""

TOO_WIDE = """() => {
    const width = document.documentElement.clientWidth, wide = [];
    if (document.documentElement.scrollWidth > width) wide.push("the page");
    for (const e of document.querySelectorAll("article *")) {
        const box = e.getBoundingClientRect();
        let inside = e.parentElement;
        while (inside && !["auto", "scroll", "hidden"].includes(getComputedStyle(inside).overflowX)) inside = inside.parentElement;
        if (box.right > width + 1 && !inside) wide.push(e.tagName + " " + e.className + " " + e.textContent.slice(0, 40));
    }
    return wide;
}"""
BROKEN = "() => [...document.images].filter(i => i.complete && i.naturalWidth === 0).map(i => i.src)"


def served(folder: pathlib.Path) -> http.server.ThreadingHTTPServer:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def address(base: str, page: str) -> str:
    return f"{base}/" if page == "index" else f"{base}/{page}/"


def take(browser: Any, base: str, given: argparse.Namespace) -> list[str]:
    """Writes PAGE-WIDTH-MODE.png for each page; returns what is wrong."""
    wrong = []
    for mode in MODES:
        for name, width in WIDTHS.items():
            context = browser.new_context(viewport={"width": width, "height": given.height}, color_scheme=mode)
            tab = context.new_page()
            for page in given.pages:
                tab.goto(address(base, page), wait_until="networkidle")
                if name == "phone" or mode == "light":
                    wrong += [
                        f"{page}, {name}, {mode}: wider than the screen: {text!r}" for text in tab.evaluate(TOO_WIDE)
                    ]
                tab.screenshot(path=str(given.out / f"{page}-{name}-{mode}.png"), full_page=given.whole)
                wrong += [f"{page}: no image at {source}" for source in tab.evaluate(BROKEN)]
            context.close()
    return wrong


def ask(browser: Any, base: str) -> list[str]:
    """Prints the first answers of the search to each of QUERIES; returns what is wrong."""
    from playwright.sync_api import TimeoutError

    wrong = []
    tab = browser.new_page(viewport={"width": 1300, "height": 900})
    for query, wanted in QUERIES.items():
        tab.goto(f"{base}/?q={query}", wait_until="networkidle")
        with contextlib.suppress(TimeoutError):  # a question without an answer
            tab.wait_for_selector(".md-search-result__link", state="attached", timeout=20_000)
        answers = tab.eval_on_selector_all(".md-search-result__link", "links => links.slice(0, 5).map(a => a.href)")
        first = [a.removeprefix(base).split("?")[0] for a in answers]
        print(f"{query:16} {' '.join(first) or 'nothing'}")
        if not first or not any(wanted in a for a in first):
            wrong.append(f"the search for {query} does not find {wanted or 'anything'}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--height", type=int, default=2000)
    parser.add_argument("--pages", nargs="+", default=PAGES)
    parser.add_argument("--whole", action="store_true", help="pages to their end")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright  # only here: no dependency of the project

    arguments.out.mkdir(parents=True, exist_ok=True)
    server = served(arguments.site)
    base = f"http://127.0.0.1:{server.server_address[1]}"
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
        browser = playwright.chromium.launch(
            executable_path=program, args=[*flags, "--disable-component-update", "--disable-sync"]
        )
        wrong = take(browser, base, arguments) + ask(browser, base)
        browser.close()
    server.shutdown()
    for line in wrong:
        print(line)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
