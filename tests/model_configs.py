"""The config.json of known models, by their names."""

import json
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "model_configs.json").read_text()
)
