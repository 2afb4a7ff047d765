"""``kvtier/admin/openapi.json`` describes the routes that are served and the forms that decode and
encode them."""

import json
from pathlib import Path

import msgspec

import kvtier
from kvtier.admin import forms, http
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
