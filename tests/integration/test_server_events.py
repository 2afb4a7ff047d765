"""What engines of a real server are told of its chunks: a picture that is true at rest, to the
chunk, whatever they and others do, also after the server was gone."""

import random

import pytest

from kvtier.client import heard
from kvtier.core.chunk import ChunkKey
from tests.child_process import DEADLINE_S, wait_for
from tests.nvme_place import SETS, section
from tests.server_process import LAYOUT, at_rest, attached, run, save, serving, told_all

PROMPTS = 12
LENGTH = 6
OPERATIONS = 2000


class Picture:
    def __init__(self, client):
        self.client = client
        self.watched = client.watch()
        self.held: set[tuple[str, ChunkKey]] = set()
        self.losses = 0

    def hear(self):
        changes = self.watched.changes()
        if changes is None:
            self.held.clear()
            self.losses += 1
        for place, key, there in changes or ():
            name = self.watched.place_names[place]
            (self.held.add if there else self.held.discard)((name, key))

    def where(self, keys):
        self.hear()
        for key, places in zip(keys, self.watched.places(keys), strict=True):
            self.held.update((self.watched.place_names[place], key) for place in places)

    def settle(self):
        """Hear all that is to be heard at rest."""
        at_rest(self.client)
        told_all(self.watched, self.hear)

    def true(self, keys):
        names = self.watched.place_names
        return {
            (names[place], key)
            for key in keys
            for places in self.watched.places([key])
            for place in places
        }


@pytest.fixture(params=SETS, ids=len)
def server(tmp_path, request):
    with serving(**section(tmp_path, request.param)) as server:
        yield server


def every():
    return [key for prompt in range(PROMPTS) for key in run(prompt, LENGTH)]


def act(rng, client):
    keys = run(rng.randrange(PROMPTS), rng.randint(1, LENGTH))
    what = rng.random()
    if what < 0.45:
        with client.save(keys) as lease:
            if rng.random() < 0.9:
                lease.commit()
    elif what < 0.9:
        with client.load(keys) as load:
            load.poll()
    elif what < 0.99:
        client.invalidate(keys[-1:])
    else:
        client.invalidate_all()


def test_at_rest_the_picture_is_what_the_server_holds(server):
    rng = random.Random(1)
    with attached(server.access()) as client, attached(server.access()) as other:
        picture = Picture(client)
        for number in range(OPERATIONS):
            act(rng, rng.choice((client, other)))
            if rng.random() < 0.3:
                picture.hear()
            if rng.random() < 0.1:
                picture.where(run(rng.randrange(PROMPTS), LENGTH))
            if number % 500 == 499:
                other.stats()  # it is answered after what it has told and is not answered
                picture.settle()
                seen = set(picture.held)
                true = picture.true(every())
                assert seen <= true, "nothing is promised that is not there"
        picture.settle()
        for key in every():
            picture.where([key])
        picture.settle()
        assert picture.held == picture.true(every()), "what was named is known to the chunk"
        assert picture.losses == 1, "the first answer of a connection"
        for prompt in range(PROMPTS, PROMPTS + 20):
            save(other, run(prompt, LENGTH))
        picture.settle()
        assert picture.held == picture.true(every()), "also when all that moves is others' doing"


def test_an_engine_without_work_waits_until_its_last_save_is_told(server, monkeypatch):
    monkeypatch.setattr(heard, "_PATIENCE_S", DEADLINE_S)
    with attached(server.access()) as client:
        picture = Picture(client)
        picture.settle()
        rests = not picture.watched.has_changes
        save(client, run(1, 1))
        rested = rests, not picture.watched.has_changes
        assert rested == (True, False)
        while picture.watched.has_changes:
            picture.hear()
        assert ("ram", run(1, 1)[0]) in picture.held


def test_when_the_server_is_gone_nothing_is_promised_and_then_everything_anew(server):
    keys = LAYOUT.keys([1, 2])
    with attached(server.access()) as client:
        picture = Picture(client)
        save(client, keys)
        wait_for(lambda: client.stats()["nvme_held"] == 2, "written to the disk")
        picture.settle()
        assert len(picture.held) == 4
        server.stop()

        def withdrawn():
            picture.hear()
            return not picture.held

        wait_for(withdrawn, "withdrawn")
        assert picture.watched.places(keys) == [[], []]
        server.start()
        wait_for(lambda: client.pool is not None, "attached again")
        picture.settle()
        assert not picture.held, "no prompt has named it since"
        picture.where(keys)
        assert picture.held == {("nvme", key) for key in keys}
        client.invalidate_all()
        client.stats()
        picture.settle()
        assert not picture.held
