"""The page at the admin port's ``/`` in a real Chromium: what it shows is what the server
counts."""

import pytest

from kvtier.bench.processes.servers import answers, free_port
from kvtier.core.lookup import Served
from tests.admin_server import TOKEN, administered, spilled
from tests.browser import chromium, opened
from tests.child_process import wait_for
from tests.server_process import LAYOUT, attached, load, run, save

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium"),
    pytest.mark.slow,
    pytest.mark.extended,
]

TAB, ENTER = 9, 13


@pytest.fixture
def server():
    with administered(slot_bytes=8192) as server:
        yield server


def use(server, first, prompts=4):
    with attached(server.access(namespace="acme")) as client:
        for prompt in range(first, first + prompts):
            save(client, run(prompt, 3))
            client.lookup(run(prompt, 3))
            load(client, run(prompt, 3))
        load(client, run(first + 1000, 2))


def ready(tab):
    tab.wait("document.getElementById('state')?.textContent === 'ready'")


def text(place):
    return f"document.getElementById('{place}').innerText"


def test_it_shows_what_the_server_counts_and_goes_on_by_itself(server, tmp_path):
    use(server, 0)
    spilled(server, 12)

    with opened(server.url, tmp_path) as tab:
        ready(tab)
        tiers = tab.value(text("tier-tables"))
        assert (
            "Chunks of 8.0 KiB; tenants and models: 1" in tiers
            and "nvme" in tiers
            and "96 KiB" in tiers
        )
        assert (
            tab.value("document.querySelector('meter').getAttribute('aria-label')")
            == "ram is 38 % full"
        )
        assert tab.value(text("misses")) and "cold" in tab.value(text("misses"))
        times = tab.value(text("times"))
        assert all(
            what in times
            for what in ("lookup", "load ram", "load nvme", "save", "promotion nvme", "spill")
        )
        assert "≤" in times
        accepted = server.ask("GET", "/v1/stats").body["connections"]["accepted"]
        assert f"accepted so far\t{accepted}" in tab.value(text("engines"))
        assert tab.value(text("faults")) == "none"
        assert not tab.value("document.getElementById('trouble').checkVisibility()")
        use(server, 100)
        tab.wait("document.querySelectorAll('#hits polygon').length === 2")
        tab.wait(f"!{text('hits-words')}.includes('hits ram 0.0')")
        assert tab.said == [], "no error, and nothing that the page's own policy forbids"


def test_other_sizes_the_policy_and_with_the_token_who_came_and_what_is_set(server, tmp_path):
    use(server, 0)
    spilled(server, 12)
    (sizes,) = server.ask("GET", "/v1/stats").body["size_classes"]
    ram = sizes["tiers"][0]["what_if"]

    with opened(server.url, tmp_path) as tab:
        ready(tab)
        lines = tab.value("document.querySelectorAll('#sizes polyline').length")
        assert lines == len([tier for tier in sizes["tiers"] if tier["what_if"]]) == 2
        shown = tab.value(text("sizes-table"))
        assert f"{100 * ram['1']:.1f} %" in shown
        assert f"{100 * ram['8']:.1f} %" in shown
        assert tab.value(text("sizes-axis")).split("\n")[0] == "0.25 x"
        policy = tab.value(text("policy"))
        assert f"{sizes['policy']} (rules now)" in policy
        assert all(setting in policy for setting in sizes["policy_hits"])

        assert "acme" not in tab.value("document.body.innerText")
        tab.value("document.getElementById('inside-token').focus()")
        tab.type("guess")
        tab.press("Enter", ENTER)
        tab.wait(f"{text('inside')}.includes('no token, or a wrong one')")
        tab.value("document.getElementById('inside-token').value = ''")
        tab.type(TOKEN)
        tab.press("Enter", ENTER)
        tab.wait(f"{text('inside')}.includes('acme')")
        assert f"{LAYOUT.fingerprint.hex()[:12]}\ttest" in tab.value(text("inside"))
        assert not tab.value("document.querySelector('#inside details').open"), (
            "defaults are folded"
        )
        tab.value("document.querySelector('#inside details').open = true")
        inside = tab.value(text("inside"))
        for row in server.ask("GET", "/v1/configuration").body["keys"]:
            assert row["key"] in inside
            assert row["reason"] in inside
        assert not tab.value("document.getElementById('inside-form').checkVisibility()")
        tab.picture(tmp_path / "inside.png")


def told(server, asked):
    """A prompt of 2,048 tokens, of which 768 came from RAM. ``asked``: what the server counts
    then."""
    with attached(server.access(namespace="acme")) as client:
        client.served(Served(2048, {"ram": 768}, run(7, 1), 256))
        wait_for(lambda: server.metric("kvtier_asked_tokens_total") == asked, "it was told")


def test_the_hit_rate_in_tokens_is_said_of_now_and_of_all_time(server, tmp_path):
    told(server, 2048)
    with opened(server.url, tmp_path) as tab:
        ready(tab)
        brings = tab.value(text("brings"))
        assert "in the last minute\t2,048\t768\t37.5 %\t36.8 %" in brings, "the server's minute"
        assert "since the start\t2,048\t768\t37.5 %\t36.8 %" in brings, "its hits are early ones"
        told(server, 4096)
        tab.wait(f"{text('brings')}.includes('in the last minute\\t4,096\\t1,536\\t37.5 %')")
        assert "since the start\t4,096\t1,536\t37.5 %" in tab.value(text("brings"))


def test_faults_and_a_server_that_is_gone_are_said(server, tmp_path):
    with opened(server.url, tmp_path) as tab:
        ready(tab)
        tab.wait("last !== null")
        server.kill()
        tab.wait("document.getElementById('state')?.textContent === 'the server does not answer'")
        assert tab.value("document.getElementById('state').className") == "bad"
        server.start()
        ready(tab)


def test_it_is_used_by_keyboard_and_read_aloud(server, tmp_path):
    use(server, 0)

    with opened(server.url, tmp_path) as tab:
        ready(tab)
        tab.press("Tab", TAB)
        assert tab.value("document.activeElement.className") == "skip"
        tab.press("Tab", TAB)
        assert tab.value("document.activeElement.id") == "pause"
        tab.press("Enter", ENTER)
        assert tab.value("document.activeElement.getAttribute('aria-pressed')") == "true"
        found = tab.named()
        heads = [name for role, name in found if role == "heading"]
        assert (
            heads[:3] == ["kvtier", "What the cache brings", "Tiers"]
            and "Why chunks were computed" in heads
        )
        roles = {role for role, _ in found}
        parts = {"main", "banner", "status", "button", "meter"}
        assert parts | {"table", "columnheader", "rowheader"} <= roles
        assert all(
            name for role, name in found if role in {"button", "link", "meter", "image", "textbox"}
        )


def test_light_and_dark_can_both_be_read(server, tmp_path):
    """Text against its background: at least 4.5 to 1 everywhere (WCAG's AA)."""
    use(server, 0)
    contrast = """(() => {
      const light = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number).map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const under = (e) => { for (; e; e = e.parentElement) {
        const c = getComputedStyle(e).backgroundColor;
        if (c !== 'rgba(0, 0, 0, 0)') return c; } return 'rgb(255, 255, 255)'; };
      const words = 'h1, h2, p, th, td, caption, a, span, li, label';
      return Math.min(...[...document.querySelectorAll(words)]
        .filter((e) => e.checkVisibility() && e.textContent.trim())
        .map((e) => { const [a, b] = [light(getComputedStyle(e).color), light(under(e))];
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }));
    })()"""

    with opened(server.url, tmp_path) as tab:
        ready(tab)
        use(server, 100)
        tab.wait("document.querySelectorAll('#hits polygon').length === 2")
        cut = (
            "[...document.querySelectorAll('.wide')].filter((e) => e.scrollWidth > "
            "e.clientWidth).map((e) => e.id)"
        )
        assert tab.value(cut) == [], "there is room for every table"
        backs = []
        for scheme in ("light", "dark"):
            tab.scheme(scheme)
            backs.append(tab.value("getComputedStyle(document.body).backgroundColor"))
            assert tab.value(contrast) >= 4.5, scheme
            tab.picture(tmp_path / f"{scheme}.png")
        assert backs[0] != backs[1]
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=400,
            height=800,
            deviceScaleFactor=1,
            mobile=True,
        )
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.value(wide) <= 0, "on a small screen only tables move sideways"
        seen = "(({ right, bottom }) => right <= 400 && bottom <= 800)"
        for rate in range(3):
            place = f"document.querySelectorAll('.figures dd')[{rate}].getBoundingClientRect()"
            assert tab.value(f"{seen}({place})"), "the rates are on the first screen of a phone"
        brings = "document.getElementById('brings')"
        assert tab.value(f"{brings}.scrollWidth <= {brings}.clientWidth"), "and so is their table"


def test_beyond_loopback_it_asks_for_the_token(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with administered(admin=f"http://0.0.0.0:{port}"):
        wait_for(lambda: answers(f"{url}/healthz"), "the surface answers")
        with opened(url, tmp_path) as tab:
            tab.wait("document.getElementById('state')?.textContent === 'a token is needed'")
            assert tab.value("document.activeElement.id") == "token"
            tab.type("guess")
            tab.press("Enter", ENTER)
            tab.wait("document.getElementById('state')?.textContent === 'the token is wrong'")
            tab.value("document.getElementById('token').value = ''")
            tab.type(TOKEN)
            tab.press("Enter", ENTER)
            ready(tab)
            assert not tab.value("document.getElementById('ask').checkVisibility()")
