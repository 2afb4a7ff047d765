"""What the benchmarks share."""

import pytest

from kvtier.bench.processes.engine import mode_told


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("vLLM 0.32.0, Model Runner V2, async scheduling", "Model Runner V2, async scheduling"),
        (
            "vLLM 0.40.0 (not tested; 0.32.0, 0.33.0 are), Model Runner V1, synchronous scheduling",
            "Model Runner V1, synchronous scheduling",
        ),
        ("vLLM 0.23.0, synchronous scheduling", "synchronous scheduling"),
    ],
)
def test_an_engines_log_says_how_it_runs(line, mode, tmp_path):
    log = tmp_path / "server.log"
    assert mode_told(log) is None
    log.write_text("INFO [vllm.py:99] Asynchronous scheduling is enabled.\n")
    assert mode_told(log) is None, "vLLM's word is not what it does"
    with log.open("a") as file:
        file.write(f"(EngineCore pid=7) INFO [connector.py:359] kvtier 0.1.0, {line}\nINFO more\n")
    assert mode_told(log) == mode
