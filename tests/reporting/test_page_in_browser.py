"""The page of a run in a browser: nothing is cut off in narrow and in wide windows."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from skippipe_jax.consensus.generations import Generation
from skippipe_jax.reporting.page import report
from skippipe_jax.storage.run_dir import RunDir
from tests.reporting.test_page import PLAN, record, start_run, write_metrics

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# Writes into the page what stands past its right edge, how wide the page is and could be shown, and
# the same of the table of hosts, which scrolls where it must.
MEASURE = """<script>
const cut = [...document.body.querySelectorAll("h1,h2,h3,p,dt,dd,th,td,svg,figure,pre,summary")]
  .filter(e => !e.closest(".wide") && e.getClientRects().length
    && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
document.body.innerHTML = JSON.stringify({
  page: [document.documentElement.scrollWidth, document.documentElement.clientWidth],
  cut: cut.map(e => e.tagName + ": " + e.textContent.trim().slice(0, 60)),
  hosts: [...document.querySelectorAll(".wide:has(> .wraps)")].map(
    e => [e.scrollWidth, e.clientWidth]),
});
document.body.setAttribute("data-measured", "yes");
</script></body>"""


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [500, 1024, 1600])
def test_nothing_is_cut_off(tmp_path: Path, width: int):
    folder = start_run(tmp_path / "run")
    write_metrics(folder, 10, validation_loss=2.5, idle_share=[0.5] * 5)
    record(folder, 10)
    for number in range(1, 5):
        members = [{"host": host, "address": "a:1"} for host in range(8)]
        told = Generation(
            number, tuple(range(8)), (7,) * 8, 0, 5, is_rewound=number > 1, cause="host 3 was lost"
        )
        RunDir(folder).append_generation(told, PLAN, members)
    page = tmp_path / "page.html"
    page.write_text(report(folder).replace("</body>", MEASURE))
    assert CHROMIUM is not None
    shown = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
            *(f"--window-size={width},1200", f"--user-data-dir={tmp_path / 'browser'}"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    [measured] = re.findall(r'<body data-measured="yes">(.*)</body>', shown, re.DOTALL)
    found = json.loads(measured)
    assert found["page"][0] <= found["page"][1]
    assert not found["cut"]
    [(needed, there)] = found["hosts"]
    assert needed <= there or width < 1000
