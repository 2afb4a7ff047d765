"""Messages between engines and a kvtier server, and their bytes. Sans-I/O: no sockets, loop, clock
or lock.

A frame is a 4-byte little-endian length and then one msgpack array ``[tag, field, ...]`` (no
pickle, no names). Lengths are checked before anything is allocated, and msgspec checks fields while
decoding. Whatever is not exactly a known message is a :class:`WireError`, which ends the
connection.

A connection begins with a greeting: ``Challenge`` (server), ``Hello`` (client), then ``Welcome`` or
``Refused`` (server). The ``mode`` of the Hello says what follows:

- ``attach`` (Unix socket, same host): the operations of a Store. The Welcome carries two
  descriptors, the pool's memory and the witness (see :mod:`kvtier.server.connection`). KV bytes
  never cross the socket.
- ``steer`` (TCP, the scheduler of an engine over several hosts): the same operations without
  descriptors. The Welcome carries a ticket instead, by which that engine's workers on the server's
  host join: they alone map the pool.
- ``join`` (Unix socket): a worker shows the ticket, gets the two descriptors, and nothing follows.
  Without a ticket it gets a Welcome that names the server, and nothing is opened.
- ``stream`` (TCP, another host): the operations of a tier, one question at a time. The bytes of a
  chunk follow ``Go`` (from the client) or ``Chunk`` (from the server) outside of any frame. After
  them comes a ``Seal`` with their checksum.

Keys travel as one blob of 40 bytes each. ``id`` pairs an answer with its question, and messages
without an ``id`` are not answered, except for ``Hear``. ``lease`` numbers belong to the session.
Lease 0 is empty and needs no end.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from kvtier.core.chunk import KEY_BYTES, ChunkKey
from kvtier.core.errors import KVTierError
from kvtier.core.lookup import Stop
from kvtier.protocol.kv_events import BlockStored

VERSION = 10
MAX_KEYS = 32_768
"""Most keys in one message: a million tokens in chunks of 32."""
MAX_FRAME_BYTES = MAX_KEYS * KEY_BYTES + 1024
MAX_GREETING_BYTES = 1024
"""Longest frame before the other side is known."""
NONCE_BYTES = PROOF_BYTES = TICKET_BYTES = 32
HEADER_BYTES = 4


class WireError(KVTierError):
    """The other side breaks this protocol: a message is malformed, too long, or out of turn."""


Number = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Slot = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * KEY_BYTES)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Bytes16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Proof = Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]
NAME_LETTERS = 64
Name = Annotated[str, msgspec.Meta(max_length=NAME_LETTERS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None
Mode = Literal["attach", "steer", "join", "stream"]
Ticket = Annotated[bytes, msgspec.Meta(max_length=TICKET_BYTES)]
Reason = Literal["slower", "deadline", "refused", "unasked"]
Numbers32k = Annotated[list[Slot], msgspec.Meta(max_length=MAX_KEYS)]
Renewed = Annotated[list[tuple[Slot, Number]], msgspec.Meta(max_length=MAX_KEYS)]


class Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True): ...


class Asked(Message):
    """A question that is answered, or its answer, which has the same number."""

    id: Number


# ---- greeting ------------------------------------------------------------------------------------


class Challenge(Message, tag=1):
    version: Number
    nonce: Bytes32


NO_SIZE = 1 << 40
"""Chunk size that no server keeps: asked for it, a server refuses and tells the sizes it keeps."""


class Hello(Message, tag=2):
    """Greeting of a client. ``fingerprint`` and ``namespace`` tell whose chunks these are.
    ``chunk_bytes`` is the size of one chunk. ``proof``: see :func:`client_proof`, empty without a
    token. ``ticket``: from the Welcome of the engine to join."""

    version: Number
    mode: Mode
    fingerprint: Bytes32
    namespace: Name
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=NO_SIZE)]
    client: Name
    nonce: Bytes32
    proof: Proof = b""
    ticket: Ticket = b""


class Welcome(Message, tag=3):
    """Answer to Hello. ``places``: what ``Claim.sources`` refers to, RAM first. ``capacity``:
    chunks that all places can hold together. ``publishes``: every :class:`Announce` is wanted.
    ``ticket``: for the engine's workers to join. ``server``: a name that no other start of a server
    has."""

    slots: Slot
    slot_bytes: Slot
    places: Annotated[list[Name], msgspec.Meta(max_length=16)]
    capacity: Slot
    proof: Proof = b""
    publishes: bool = False
    ticket: Ticket = b""
    server: Ticket = b""


class Refused(Message, tag=4):
    """Last message of a connection: why it ends."""

    reason: Annotated[str, msgspec.Meta(max_length=900)]
    later: bool = False
    """Whether the client did no wrong and may try again."""
    slot_bytes: Annotated[list[Slot], msgspec.Meta(max_length=16)] | None = None
    """Sizes that are kept, if the client asked for one that no server keeps."""


# ---- attach: questions ---------------------------------------------------------------------------


class LookupCall(Asked, tag=10):
    keys: Keys


class KnownCall(Asked, tag=28):
    """Question, for each of these chunks by itself, whether the server knows it."""

    keys: Keys


class Save(Asked, tag=11):
    keys: Keys


class LoadCall(Asked, tag=12):
    keys: Keys
    start: Number
    most: Number = MAX_KEYS
    session: Name = ""
    tokens: Number = 0
    again: bool = False
    request: Number = 0
    """Number of the request. It and the three before: see :class:`kvtier.core.lookup.Asker`."""


class Poll(Asked, tag=13):
    """Question for a load lease's progress. ``known``: ready chunks that the client was told of."""

    lease: Number
    known: Number


class Wait(Asked, tag=14):
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=10_000)]


class StatsCall(Asked, tag=15):
    pass


class Check(Asked, tag=16):
    idle: bool


class Commit(Message, tag=17):
    lease: Number


class End(Message, tag=18):
    """Release a load lease, or abandon a save lease."""

    lease: Number


class Invalidate(Message, tag=19):
    keys: Keys


class InvalidateAllCall(Message, tag=20):
    pass


class Decline(Message, tag=21):
    keys: Keys
    reason: Reason


class HintCall(Message, tag=22):
    """A :class:`kvtier.eviction.hints.Hint`. Without keys it is of the session's last prompt."""

    keys: Keys
    over: bool
    keep_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)]
    session: Name = ""


class ServedCall(Message, tag=23):
    """A :class:`kvtier.core.lookup.Served`. ``hits``: tokens by place. ``keys``: its ``rest``."""

    asked: Number
    hits: Annotated[list[Number], msgspec.Meta(max_length=16)]
    keys: Keys
    chunk_tokens: Number
    end: Number


class EndedCall(Message, tag=26):
    request: Number
    tokens: Number
    stop: Stop


class Where(Asked, tag=25):
    """Question for the places of the leading chunks. Changes of those held are told from now on."""

    keys: Keys


class Announce(Message, tag=27):
    """vLLM's event of a chunk that is in this place. Only for a server that publishes."""

    key: Key
    place: Number
    event: BlockStored


class Hear(Message, tag=24):
    """Question for changes of the chunks that this session has named since its first Hear. Answered
    at once, and not to be asked again before that."""


Question = (
    LookupCall
    | KnownCall
    | Save
    | LoadCall
    | Poll
    | Wait
    | StatsCall
    | Check
    | Commit
    | End
    | Invalidate
    | InvalidateAllCall
    | Decline
    | HintCall
    | ServedCall
    | EndedCall
    | Where
    | Hear
    | Announce
)

# ---- attach: answers -----------------------------------------------------------------------------


class LookupReply(Asked, tag=30):
    """Answer to LookupCall, see :mod:`kvtier.core.lookup`. ``most_held``: how many slots the
    session's leases may have together."""

    steps: Annotated[list[tuple[Number, Seconds]], msgspec.Meta(min_length=1, max_length=64)]
    asking: tuple[Seconds, Seconds, Annotated[float, msgspec.Meta(ge=0, le=1)]] | None = None
    why: Name = ""
    most_held: Slot = 0


class Known(Asked, tag=37):
    """Answer to KnownCall: a byte for each key, 1 where the server knows of the chunk."""

    each: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]


class Slots(Asked, tag=31):
    """Answer to Save: chunk ``places[i]`` of the run belongs in ``slots[i]``. ``renewed``: those
    whose memory went back to the host, and how often."""

    lease: Number
    places: Numbers32k
    slots: Numbers32k
    renewed: Renewed = []


class Claim(Asked, tag=32):
    """Answer to Load and Poll: the chunks that became ready after the first ``known``. ``sources``
    are indexes of places. ``renewed``: see :class:`Slots`."""

    lease: Number
    coming: Number
    slots: Numbers32k
    sources: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]
    renewed: Renewed = []


class Done(Asked, tag=33):
    """Answer to Wait and Check, and to a stream's Delete. ``trouble`` says what Check found."""

    trouble: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Counted(Asked, tag=34):
    values: Annotated[dict[Name, int], msgspec.Meta(max_length=1024)]


class Placed(Asked, tag=35):
    """Answer to Where: for each leading chunk that is held the places as bits, RAM first."""

    places: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]], msgspec.Meta(max_length=MAX_KEYS)
    ]


class Changed(Message, tag=36):
    """Answer to Hear. For each key ``what`` has a byte: twice the place, and 1 more when the chunk
    came. ``lost``: nothing that was told before holds, and no change comes with that."""

    keys: Keys
    what: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]
    more: bool = False
    lost: bool = False


Numbered = LookupReply | Known | Slots | Claim | Done | Counted | Placed
Answer = Numbered | Changed

# ---- stream --------------------------------------------------------------------------------------


OTHER_SIZE = ChunkKey(b"kvtier: other chunk size".ljust(KEY_BYTES, b"\0"))
"""Key that no chunk has. A Find of it alone counts 1 if the server keeps chunks of the client's
model in another size too. A server that does not know of it counts 0."""


class Find(Asked, tag=40):
    keys: Keys


class Get(Asked, tag=41):
    key: Key


class Put(Asked, tag=42):
    key: Key


class Seal(Message, tag=43):
    """Checksum that follows the bytes of a chunk."""

    checksum: Bytes16


class Delete(Asked, tag=44):
    key: Key


class Found(Asked, tag=50):
    """Answer to Find: leading chunks held, without a gap."""

    count: Number


class Chunk(Asked, tag=51):
    """Answer to Get: ``size`` bytes and a Seal follow. 0 is a miss."""

    size: Slot


class Go(Asked, tag=52):
    """First answer to Put. ``send``: whether the client shall send the bytes and a Seal. Otherwise
    ``held`` says whether the chunk is there already."""

    send: bool
    held: bool


class Stored(Asked, tag=53):
    kept: bool


StreamQuestion = Find | Get | Put | Seal | Delete
StreamAnswer = Found | Chunk | Go | Stored | Seal | Done | Refused

# ---- bytes ---------------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode


def frame(message: Message) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def joined(keys: Sequence[ChunkKey]) -> bytes:
    return b"".join(keys)


def split(blob: bytes) -> list[ChunkKey]:
    """Split a blob into keys. Raises WireError unless its length is a multiple of a key's."""
    if len(blob) % KEY_BYTES:
        raise WireError(f"a blob of {len(blob)} bytes of keys, expected a multiple of {KEY_BYTES}")
    return [ChunkKey(blob[at : at + KEY_BYTES]) for at in range(0, len(blob), KEY_BYTES)]


# ---- proofs: each end shows that it has the token, which never crosses the wire ------------------


def client_proof(token: bytes, challenge: Challenge, hello: Hello) -> bytes:
    """Make the HMAC-SHA256 (RFC 2104) of both nonces and all fields of the Hello, valid once."""
    said = _encode(msgspec.structs.replace(hello, proof=b""))
    return hmac.digest(token, b"kvtier client\0" + challenge.nonce + said, hashlib.sha256)


def server_proof(token: bytes, challenge: Challenge, hello: Hello) -> bytes:
    """Make the server's proof, so that a client with a token gives no KV to an impostor."""
    return hmac.digest(token, b"kvtier server\0" + hello.nonce + challenge.nonce, hashlib.sha256)


def proven(expected: bytes, given: bytes) -> bool:
    return hmac.compare_digest(expected, given)
