"""The toy of the benchmark of spans: its task, its workload, and what is trained."""

import random

import pytest

from kvtier.bench.spans import toy
from kvtier.bench.spans.arms import as_ask

WORD = toy.WORDS.index


def documents(count=6):
    draw = random.Random(3)
    return toy.pool(draw, [draw.randint(toy.SHORTEST, 60) for _ in range(count)])


def test_kinds_take_turns_and_every_answer_is_known():
    asked = toy.questions(40, zipf=1.0, seed=0)
    assert [known.kind for _, known in asked] == [*toy.KINDS] * 10
    pool = {tuple(document) for question, _ in asked for document in question.documents}
    assert len(pool) <= toy.POOL
    for question, (kind, answer) in asked:
        assert question.question[0] == WORD(f"{kind}?")
        assert any(answer in document for document in question.documents)
        assert len({tuple(document) for document in question.documents}) == toy.FOUND
        tokens = as_ask(0, 0, question, "given", 1).prompt
        assert len(tokens) < toy.LONGEST
    assert toy.questions(40, 1.0, 0) == asked != toy.questions(40, 1.0, 1)


def test_what_is_trained_is_the_same_again_and_looks_where_answers_stand(tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kvtier.bench.spans import train

    made, again = (train.make_toy(tmp_path / name, steps=2) for name in ("toy", "again"))
    weights = "model.safetensors"
    assert (made / weights).read_bytes() == (again / weights).read_bytes(), "a seed decides"
    batch = train.draw_batch(random.Random(0), 2, 2, (20, 28), 4)
    scores, shares = train.forward(train.drawn(0), batch)
    assert scores.shape == (len(batch.kinds), len(toy.WORDS)) and len(shares) == 3
    looks = {
        (row, place): target for layer, row, place, target in batch.looks.tolist() if layer == 2
    }
    for (row, place, answer), kind in zip(batch.answers.tolist(), batch.kinds, strict=True):
        assert kind == "two-hops" or batch.tokens[row, looks[row, place]] == answer
    share = shares[0][0]
    assert not share.triu(1).any() and share[-1].all(), "a gap in positions parts no prompt"
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    words = ["n3", "w0", "k7", "v1", "e3"]
    assert tokenizer.encode(" ".join(words)) == [WORD(word) for word in words]
