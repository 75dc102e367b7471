"""The site as a browser shows it: formulas where they belong, its own font, nothing asked of anybody else."""

import json
import shutil
import subprocess
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
]
SHOWN = ["", "guide/server_update/", "guide/corrections/", "guide/rules/", "reference/curves/"]
WRONG = "<!doctype html><title>w</title><math><msub><mrow><mo>(</mo><mi>C</mi></mrow><mo>)</mo></msub></math>"
WRONG += '<script src="http://elsewhere.invalid/a.js"></script><script>undefined.name</script><img src="none.png">'

# In every page, before its own scripts.
WATCH = """<script>
window.problems = []
addEventListener("error", e => problems.push(e.message || "not loaded: " + (e.target.src || e.target.href)), true)
addEventListener("unhandledrejection", e => problems.push(String(e.reason)))
console.error = (...words) => problems.push(words.join(" "))
</script>"""

# Opens the pages one after another, and sends what it sees.
DRIVER = """<!doctype html><title>driver</title><iframe width="1200" height="1600"></iframe><script>
const box = element => {
  const {left, right, top, bottom, width, height} = element.getBoundingClientRect()
  return {left, right, top, bottom, width, height, middle: (top + bottom) / 2}
}
const seen = (page, frame) => {
  const {document: d, performance: p, problems} = frame.contentWindow
  const scripts = [...d.querySelectorAll("msub, msup")].map(e => {
    return {tag: e.localName, text: e.textContent, base: box(e.children[0]), script: box(e.children[1])}
  })
  const fences = []
  for (const math of d.querySelectorAll("math")) {
    const opened = []
    for (const e of math.querySelectorAll("mo")) {
      if ("([{".includes(e.textContent)) opened.push(e)
      else if (")]}".includes(e.textContent) && opened.length)
        fences.push({text: math.textContent, opening: box(opened.pop()), closing: box(e)})
    }
  }
  return {
    page, problems, scripts, fences, math: d.querySelectorAll("math").length,
    empty: [...d.querySelectorAll("math")].filter(e => !box(e).width).length,
    fonts: [...d.fonts].filter(font => font.status == "loaded").map(font => font.family),
    requests: p.getEntriesByType("resource").map(e => [e.name, e.responseStatus]),
    width: d.documentElement.scrollWidth,
    text: d.body.innerText.length,
  }
}
const frame = document.querySelector("iframe")
const visit = page => new Promise(done => {
  frame.onload = async () => {
    await frame.contentDocument.fonts.ready
    await new Promise(next => setTimeout(next, 100))
    done(seen(page, frame))
  }
  frame.src = "/" + page
})
;(async () => {
  const all = []
  for (const page of PAGES) all.push(await visit(page))
  await fetch("/seen", {method: "POST", body: JSON.stringify(all)})
})()
</script>"""


class Site(SimpleHTTPRequestHandler):
    """Serves the folder of the site, the driver, a page with every fault, and takes what the driver saw."""

    def do_GET(self):
        path = Path(self.directory, self.path.partition("?")[0].strip("/"), "index.html")
        if self.path == "/driver":
            self._page(DRIVER.replace("PAGES", json.dumps(self.server.pages)))
        elif self.path == "/frames":
            frames = [f'<iframe src="/{page}" width="1400" height="1000" style="border:0"></iframe>' for page in SHOWN]
            self._page("<!doctype html><body style='margin:0'>" + "".join(frames))
        elif self.path == "/wrong":
            self._page(WATCH + WRONG)
        elif path.exists() and self.path.partition("?")[0].endswith("/"):
            self._page(path.read_text().replace("<head>", "<head>" + WATCH, 1))
        else:
            super().do_GET()

    def do_POST(self):
        self.server.seen = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._page("")
        self.server.done.set()

    def _page(self, text):
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server(site):
    if CHROMIUM is None:
        pytest.skip("needs chromium, as Debian has it")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=site)) as server:
        server.done = threading.Event()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chromium(server, path, profile, *flags):
    # No name but that of this machine is found.
    own = [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    address = f"http://127.0.0.1:{server.server_address[1]}"
    return subprocess.Popen(
        [CHROMIUM, *FLAGS, *own, *flags, address + path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def visit(server, pages, profile):
    """What the browser saw of each page."""
    server.pages = pages
    server.done.clear()
    # Without a port for its tools, a headless browser ends as soon as a page is loaded.
    browser = chromium(server, "/driver", profile, "--remote-debugging-port=0")
    try:
        assert server.done.wait(300), "the browser sent nothing"
    finally:
        browser.terminate()
        browser.wait(30)
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    return {page["page"]: {**page, "address": address} for page in server.seen}


@pytest.fixture(scope="module")
def seen(server, tmp_path_factory):
    return visit(server, [*SHOWN, "wrong"], tmp_path_factory.mktemp("profile"))


def faults(page):
    """What is wrong with a page, in words."""
    found = Counter()
    found["problem"] = len(page["problems"])
    for name, status in page["requests"]:
        found["elsewhere"] += not name.startswith(page["address"])
        found["failed"] += status >= 400 or status == 0
    for pair in page["fences"]:
        opening, closing = pair["opening"], pair["closing"]
        # Half a pixel: what a browser rounds.
        found["fence"] += abs(opening["middle"] - closing["middle"]) > 0.5 or opening["right"] > closing["left"] + 0.5
    for case in page["scripts"]:
        base, script = case["base"], case["script"]
        is_low = script["middle"] > base["middle"]
        found["script"] += is_low != (case["tag"] == "msub") or script["left"] < base["right"] - 0.3 * base["height"]
    found["empty"] = page["empty"]
    found["wide"] = page["width"] > 1200
    return {name for name, times in found.items() if times}


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_is_shown_without_fault(seen, page):
    assert seen[page]["text"] > 500
    assert faults(seen[page]) == set(), seen[page]


@pytest.mark.soak
def test_every_page_is_shown_without_fault(server, site, tmp_path):
    pages = [str(path.relative_to(site).parent / " ").strip() for path in sorted(site.rglob("index.html"))]
    found = visit(server, pages, tmp_path)
    assert len(found) == len(pages) > 50
    assert {name: faults(page) for name, page in found.items() if faults(page)} == {}


def test_formulas_have_the_font_of_the_site(seen):
    step = seen["guide/server_update/"]
    assert step["math"] > 30
    assert len(step["scripts"]) > 20
    assert len(step["fences"]) > 10
    assert [name.strip('"') for name in step["fonts"]] == ["Pagella Math"]


def test_what_is_wrong_is_seen(seen):
    assert {"problem", "elsewhere", "failed", "fence"} <= faults(seen["wrong"])


def test_screenshots_are_not_blank(server, tmp_path):
    """`make screens` keeps the picture, to be looked at."""
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "screens.png"
    chromium(
        *(server, "/frames", tmp_path / "profile", f"--screenshot={picture}", f"--window-size=1400,{1000 * len(SHOWN)}")
    ).wait(120)
    with image.open(picture) as opened:
        for number in range(len(SHOWN)):
            part = opened.crop((200, 1000 * number + 100, 1200, 1000 * number + 1000)).convert("L")
            dark = sum(part.histogram()[:128])
            assert dark > 5000, SHOWN[number]


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("aggregate", "guide/training_loop/"),
        ("flower", "guide/flower/"),
        ("checkpoint", "guide/fault_tolerance/"),
        ("rate", "guide/rate_and_concurrency/"),
        ("geoopt", "guide/geoopt/"),
        ("install", "guide/install/"),
    ],
)
def test_the_search_knows_a_page_by_its_word(site, word, page):
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = [entry for entry in index if word in f"{entry['title']} {entry['text']}".lower()]
    assert any(entry["location"].startswith(page) for entry in found), [entry["location"] for entry in found]
    # By its title too, where words weigh most: a section or an entry of the reference.
    assert any(word in entry["title"].lower() for entry in found)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("differential privacy", "guide/differential_privacy/"),
        ("gpu", "guide/gpu/"),
        ("tensorboard", "guide/monitoring/"),
        ("resume", "guide/fault_tolerance/"),
        ("concurrency", "guide/rate_and_concurrency/"),
        ("batchnorm", "guide/training_loop/"),
        ("lora", "guide/adapters/"),
        ("dropout of clients", "guide/fault_tolerance/"),
    ],
)
def test_a_title_of_the_page_contains_the_words_of_the_search(site, words, page):
    """The search weighs a word in a title a thousand times as much as one in the text."""
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    titles = [entry["title"].lower() for entry in index if entry["location"].startswith(page)]
    assert any(words in title for title in titles), titles
