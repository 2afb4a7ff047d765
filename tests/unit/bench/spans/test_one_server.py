"""The user's own prompts in the benchmark of spans: the file, and which salt a request has."""

import pytest

from kvtier.bench.requests.client import Client
from kvtier.bench.spans.arms import ONE_SERVER, Question
from kvtier.bench.spans.one_server import Prompts, read
from kvtier.core.errors import ConfigError

QUESTIONS = [Question([1, 2], [[3, 4], [5, 6]], [7]), Question([1, 2], [[5, 6], [3, 4]], [8])]
NOWHERE = Client("http://localhost:1", "m", vllm=True, timeout_s=1)


def arm(name):
    return next(one for one in ONE_SERVER if one.name == name)


def test_no_arm_sees_what_another_has_cached():
    made = Prompts(QUESTIONS, 4)
    cold, exact = made.asks(arm("none")), made.asks(arm("kvtier"))
    blended = [ask for k in (0, 16, 64) for ask in made.asks(arm(f"spans-k{k}"))]
    assert len({ask.salt for ask in cold}) == len(QUESTIONS), "a cold prompt meets no other"
    assert len({ask.salt for ask in exact}) == 1, "exact prompts meet each other"
    homes = made.homes(4)
    assert {ask.salt for ask in blended} == {home.salt for home in homes}
    assert all(not set("@/\\") & set(ask.salt) for ask in [*cold, *exact, *blended]), (
        "as vLLM wants"
    )
    salts = [{ask.salt for ask in asks} for asks in (cold, exact, blended)]
    assert sum(map(len, salts)) == len(set.union(*salts))
    assert all(ask.params == {"kvtier.cache": False} for ask in cold), "nor is it kept"
    assert [ask.prompt for ask in cold] == [ask.prompt for ask in exact]


def test_parts_in_token_ids_are_taken_as_they_are(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('{"anchor": [1], "documents": [[2], [3]], "question": [4]}\n\n')
    assert read(file, NOWHERE) == [Question([1], [[2], [3]], [4])]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a prompt a line"),
        ("{no", "line 1: JSON is malformed"),
        ('{"anchor": [1], "documents": [[2]], "question": [3]}\n{"anchor": [1]}', "line 2: "),
        ('{"anchor": [1], "documents": [], "question": [3]}', "line 1: a part is empty"),
        ('{"anchor": [1], "documents": [[]], "question": [3]}', "line 1: a part is empty"),
        ('{"anchor": [1], "documents": ["x", 7], "question": [3]}', "line 1: Expected"),
        ('{"anchor": [1], "documents": [[2]], "question": [3], "k": 1}', "unknown field `k`"),
    ],
)
def test_other_lines_are_refused_by_their_number(tmp_path, text, said):
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--prompts") as refused:
        read(file, NOWHERE)
    assert said in str(refused.value)
