"""Tests of the site in a browser: rendered formulas, no script errors, no external requests, and two widths."""

import json
import re
import shutil
import subprocess
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from manifoldagg import corrections
from manifoldagg.federated import rules

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
]
SHOWN = ["index.html", "guide/server_update.html", "guide/corrections.html", "rules/krum.html", "reference/curves.html"]
WIDTHS = (1200, 400)
# A page with every fault: an invalid formula, a formula without width, failing scripts, and excessive width.
WRONG = r"""<!doctype html><title>w</title><div style="width:2000px">wide</div>
<span class="arithmatex">\(\frac{\)</span><span class="arithmatex" style="display:none">\(x\)</span>
<script src="/assets/katex/katex.min.js"></script><script src="/assets/formulas.js"></script>
<span class="arithmatex">\(y\)</span>
<script src="http://elsewhere.invalid/a.js"></script><script>undefined.name</script><img src="none.png">"""

# The handler inserts this script at the start of every page.
WATCH = """<script>
window.problems = []
addEventListener("error", e => problems.push(e.message || "not loaded: " + (e.target.src || e.target.href)), true)
addEventListener("unhandledrejection", e => problems.push(String(e.reason)))
console.error = (...words) => problems.push(words.join(" "))
</script>"""

# The driver opens the pages in turn and sends its observations.
DRIVER = """<!doctype html><title>driver</title><iframe width="1200" height="1600"></iframe><script>
const seen = (page, frame) => {
  const {document: d, performance: p, problems} = frame.contentWindow
  const formulas = [...d.querySelectorAll(".arithmatex")]
  return {
    page, problems, formulas: formulas.length,
    raw: formulas.filter(e => !e.querySelector(".katex")).map(e => e.textContent),
    errors: [...d.querySelectorAll(".katex-error")].map(e => e.title),
    empty: [...d.querySelectorAll(".katex-html")].filter(e => !e.getBoundingClientRect().width).length,
    fonts: [...d.fonts].filter(font => font.status == "loaded").map(font => font.family),
    requests: p.getEntriesByType("resource").map(e => [e.name, e.responseStatus]),
    text: d.body.innerText.length,
  }
}
const frame = document.querySelector("iframe")
const visit = page => new Promise(done => {
  frame.onload = async () => {
    await frame.contentDocument.fonts.ready
    const result = {}
    for (const width of WIDTHS) {
      frame.width = width
      await new Promise(next => setTimeout(next, 100))
      result[width] = frame.contentDocument.documentElement.scrollWidth
    }
    done({...seen(page, frame), widths: result})
  }
  frame.width = WIDTHS[0]
  frame.src = "/" + page
})
;(async () => {
  const all = []
  for (const page of PAGES) all.push(await visit(page))
  await fetch("/seen", {method: "POST", body: JSON.stringify(all)})
})()
</script>"""


class Site(SimpleHTTPRequestHandler):
    """Serve the site, the driver and a page with every fault, and receive the observations of the driver."""

    def do_GET(self):
        path = Path(self.directory, self.path.partition("?")[0].strip("/"))
        if self.path == "/driver":
            self._page(DRIVER.replace("PAGES", json.dumps(self.server.pages)).replace("WIDTHS", json.dumps(WIDTHS)))
        elif self.path == "/frames":
            frames = [f'<iframe src="/{page}" width="1400" height="1000" style="border:0"></iframe>' for page in SHOWN]
            self._page("<!doctype html><body style='margin:0'>" + "".join(frames))
        elif self.path == "/wrong":
            self._page(WRONG.replace("<title>", WATCH + "<title>"))
        elif path.exists() and path.suffix == ".html":
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
        pytest.skip("needs chromium")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=site)) as server:
        server.done = threading.Event()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chromium(server, path, profile, *flags):
    # All other hosts are unreachable.
    own = [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    address = f"http://127.0.0.1:{server.server_address[1]}"
    return subprocess.Popen(
        [CHROMIUM, *FLAGS, *own, *flags, address + path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def visit(server, pages, profile):
    """Return the observations of each page."""
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
    """Return the kinds of faults of a page."""
    found = Counter()
    found["problem"] = len(page["problems"])
    for name, status in page["requests"]:
        found["elsewhere"] += not name.startswith(page["address"])
        found["failed"] += status >= 400 or status == 0
    found["raw"] = len(page["raw"])
    found["latex"] = len(page["errors"])
    found["empty"] = page["empty"]
    found["wide"] = sum(seen > int(width) for width, seen in page["widths"].items())
    return {name for name, times in found.items() if times}


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_has_no_faults(seen, page):
    assert seen[page]["text"] > 500
    assert faults(seen[page]) == set(), seen[page]


@pytest.mark.soak
def test_every_page_has_no_faults(server, site, tmp_path):
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
    found = visit(server, pages, tmp_path)
    assert len(found) == len(pages) > 50
    assert {name: faults(page) for name, page in found.items() if faults(page)} == {}


def test_formulas_have_the_fonts_of_the_site(seen):
    step = seen["guide/server_update.html"]
    assert step["formulas"] > 30
    assert {"KaTeX_Main", "KaTeX_Math"} <= {name.strip('"') for name in step["fonts"]}


def test_each_kind_of_fault_is_detected(seen):
    assert faults(seen["wrong"]) == {"problem", "elsewhere", "failed", "raw", "latex", "empty", "wide"}


def dump(site, page, profile):
    """Return the document of a page that is opened from the file system."""
    own = [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=8000"]
    command = [CHROMIUM, *FLAGS, *own, "--dump-dom", f"file://{site}/{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_pages_and_search_work_from_the_file_system(site, tmp_path):
    page = dump(site, "guide/server_update.html", tmp_path / "profile")
    assert page.count('class="katex"') > 30
    assert "katex-error" not in page
    results = dump(site, "index.html?q=resume", tmp_path / "profile")
    assert re.search(r'class="md-search-result__link"[^>]*href="[^"]*guide/fault_tolerance.html', results) or re.search(
        r'href="[^"]*guide/fault_tolerance.html[^"]*"[^>]*class="md-search-result__link"', results
    )


def test_landing_page_and_readme_have_the_same_introduction(site):
    root = Path(__file__).parents[1]
    first = [(root / name).read_text().split("\n\n")[1] for name in ("README.md", "docs/index.md")]
    assert " ".join(first[0].split()) == " ".join(first[1].split())


NO_CORRECTIONS = {
    *("Composition", "Corrected", "Correction", "Frame", "Gram", "Transport", "calibrate", "rotate_control"),
    *("CorrectionQuality", "correction_quality"),
}


def test_every_rule_and_correction_has_a_page(site):
    for folder, package, others in (
        ("rules", rules, {"Dominance"}),
        ("corrections", corrections, NO_CORRECTIONS),
    ):
        names = set(package.__all__) - others
        assert {path.stem for path in (site / folder).glob("*.html")} == {name.lower() for name in names}
        overview = (site / "guide" / f"{folder}.html").read_text()
        for name in names:
            text = (site / folder / f"{name.lower()}.html").read_text()
            assert f'id="{package.__name__}.{name}"' in text
            assert ">When to use" in text
            assert re.search(r"<h2 id=\"cost\">|<strong>Cost</strong>", text), name
            assert f'href="../{folder}/{name.lower()}.html"' in overview, name


def test_screenshots_are_not_blank(server, tmp_path):
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
        ("aggregate", "guide/training_loop.html"),
        ("flower", "guide/flower.html"),
        ("checkpoint", "guide/fault_tolerance.html"),
        ("rate", "guide/rate_and_concurrency.html"),
        ("geoopt", "guide/geoopt.html"),
        ("install", "guide/install.html"),
    ],
)
def test_search_finds_a_page_by_a_word(site, word, page):
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = [entry for entry in index if word in f"{entry['title']} {entry['text']}".lower()]
    assert any(entry["location"].startswith(page) for entry in found), [entry["location"] for entry in found]
    # A title must also contain the word, because the search gives titles the most weight.
    assert any(word in entry["title"].lower() for entry in found)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("differential privacy", "guide/differential_privacy.html"),
        ("gpu", "guide/gpu.html"),
        ("tensorboard", "guide/monitoring.html"),
        ("resume", "guide/fault_tolerance.html"),
        ("concurrency", "guide/rate_and_concurrency.html"),
        ("batchnorm", "guide/training_loop.html"),
        ("lora", "guide/adapters.html"),
        ("dropout of clients", "guide/fault_tolerance.html"),
    ],
)
def test_a_title_of_the_page_contains_the_words_of_the_search(site, words, page):
    """The search gives a word in a title a thousand times the weight of a word in the text."""
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    titles = [entry["title"].lower() for entry in index if entry["location"].startswith(page)]
    assert any(words in title for title in titles), titles
