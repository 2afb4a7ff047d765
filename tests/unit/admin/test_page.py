"""The page's file: nothing of another origin is in it, and its policy lets run what is in it and
nothing else."""

import base64
import hashlib
import re

from kvtier.admin.http import page


def test_its_policy_names_what_is_in_it_by_digest_and_nothing_else():
    body, headers = page()
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"


def test_it_has_no_outside_asset_and_makes_no_html_of_what_it_is_told():
    text = page()[0].decode()
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}, (
        "the name of a namespace"
    )
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon\w+=", text
    )
    assert not re.search(r"<(link|img|iframe|script src|object)\b", text)
    assert (
        "localStorage" not in text
        and "sessionStorage" not in text
        and "document.cookie" not in text
    )
