"""A result of the suite has no samples, host and paths, so that it can be committed."""

from __future__ import annotations

from typing import Any

from kvtier.bench.report import machine_facts


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    output_json |= {"machine_info": machine_facts(), "commit_info": {}}
    for one in output_json["benchmarks"]:
        one["stats"].pop("data", None)
