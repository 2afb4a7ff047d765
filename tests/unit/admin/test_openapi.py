"""``kvtier/admin/openapi.json`` describes the routes that are served and the forms that decode and
encode them. And the page's file has nothing of another origin, as its policy says."""

import base64
import hashlib
import json
import re
from pathlib import Path

import msgspec

import kvtier
from kvtier.admin import forms, http
from kvtier.admin.http import page
from kvtier.admin.status import Moments, Stats

DOCUMENT = json.loads(Path(http.__file__).with_name("openapi.json").read_text())
TOKEN = {"token": list[str]()}


def operations():
    return {
        (method.upper(), path): operation
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    }


def named(operation):
    return {text.split('"')[0] for text in json.dumps(operation).split("#/components/schemas/")[1:]}


def without_prose(part):
    if isinstance(part, dict):
        return {key: without_prose(each) for key, each in part.items() if key != "description"}
    return [without_prose(each) for each in part] if isinstance(part, list) else part


def test_each_route_is_described_and_no_other():
    assert DOCUMENT["info"]["version"] == kvtier.__version__
    described = operations()
    assert set(described) == {(route.method, route.path) for route in forms.ROUTES}
    for route in forms.ROUTES:
        operation = described[route.method, route.path]
        alternatives = [] if route.open else [TOKEN] if route.secret else [{}, TOKEN]
        assert operation["security"] == alternatives, route
        asked = named(operation.get("requestBody", {}))
        assert asked == ({route.asks.__name__} if route.asks else set()), route


def test_schemas_are_those_of_the_forms():
    described = DOCUMENT["components"]["schemas"]
    known = {**vars(forms), "Stats": Stats, "Moments": Moments}
    used = set[str]().union(*(named(operation) for operation in operations().values()))
    kinds = [known[name] for name in sorted(used)]
    _, made = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    assert without_prose(made) == without_prose(described), "correct kvtier/admin/openapi.json"


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
