"""Extensions of the scheduler's half: see :mod:`kvtier.connectors.vllm.extension`."""
