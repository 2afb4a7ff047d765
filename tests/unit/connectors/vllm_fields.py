"""The fields of vLLM's configuration classes, read from its sources:
``python -m tests.unit.connectors.vllm_fields VERSION=SITE ...`` writes ``tests/data``."""

import ast
import json
import re
import sys
from pathlib import Path

RECORDED = Path(__file__).parents[2] / "data" / "vllm_config_fields.json"

Classes = dict[str, dict[str, str]]
"""Class -> its fields -> the configuration class of a field's object, or ""."""


def read(site):
    """``site``: the folder in which the package ``vllm`` lies."""
    bodies = {
        one.name: one.body
        for file in sorted((site / "vllm" / "config").glob("*.py"))
        for one in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(one, ast.ClassDef) and one.decorator_list
    }

    def of(annotation):
        return next((word for word in re.findall(r"\w+", annotation) if word in bodies), "")

    return {
        name: {
            one.target.id: of(told)
            for one in body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            if not re.search("ClassVar|InitVar", told := ast.unparse(one.annotation))
        }
        for name, body in bodies.items()
    }


def main(words):
    told = {version: read(Path(site)) for version, site in (word.split("=") for word in words)}
    kept = {
        version: {name: fields for name, fields in classes.items() if fields}
        for version, classes in told.items()
    }
    lines = [
        f"{json.dumps(version)}: {{\n"
        + ",\n".join(f"{json.dumps(one)}: {json.dumps(fields)}" for one, fields in classes.items())
        + "\n}"
        for version, classes in kept.items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
