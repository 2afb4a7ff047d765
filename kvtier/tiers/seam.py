"""The seam between kvtier and a tier: what a tier's package has, and what it is given.

A tier's package (or one module of it) has six names, and :mod:`kvtier.tiers.registry` finds it:

- ``SECTION``: a subclass of :class:`TierSection`, its keys;
- ``open(own, around)``: the tier itself;
- ``away(own)``: why the tier cannot be used for now, before anything is opened;
- ``probe(own)``: what ``plan`` has to know, a :class:`TierFacts`;
- ``findings(own, tried)``: what ``kvtier doctor`` says of it;
- ``plan(found, draft)``: what auto-config sets of its keys, or why it leaves the tier out.

``own`` is an instance of ``SECTION`` whose first key is set. A tier whose first key is None is not
configured, and no function that takes ``own`` is called. The module is imported whenever a
configuration is read, so slow imports belong inside its functions. Errors for the operator are
ConfigError or TierError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from kvtier.core.errors import KVTierError
from kvtier.core.fact import Fact
from kvtier.tiers.base import Tier
from kvtier.tiers.finding import Finding

Value = int | float | str
T = TypeVar("T", int, float)

NO_URL = "no URL was given"
"""The plan's reason for a tier without a URL."""


class Url(Protocol):
    """Reader of a URL that is the value of a key. A module can be one."""

    def parse(self, text: str) -> object:
        """Raises ConfigError, whose text shows no piece of ``text``."""

    def masked(self, text: str) -> str:
        """``text`` as a log may show it."""

    def safe(self, text: str) -> str | None:
        """:meth:`masked` for any text that may be a URL of this kind. None: it is of another."""


class About(NamedTuple):
    """Purpose of a key."""

    unit: str
    """A word of :data:`kvtier.config.values.PARSERS`, or ``url``."""
    reason: str
    """One line for tables and help. The text behind ``none:`` says what no value means."""
    needs: str = ""
    """The key of the same section without which this one has no effect, and is refused."""
    url: Url | None = None
    """For the unit ``url``: what reads it."""
    planned: Literal["", "given", "measured"] = ""
    """Whether a plan sets it: from what the operator gave, or from what the machine has."""
    flag: str = ""
    """The help of its flag of ``kvtier plan``. Empty: there is no such flag."""
    flat: str = ""
    """The flat name, where it is not the section's prefix and the field's name."""


def key(unit: str, reason: str, default: Any = None, **more: Any) -> Any:
    """A field of a :class:`ConfigSection`. ``more``: other fields of :class:`About`. A trailing
    ``_`` of the field's name is not part of the key."""
    return field(default=default, metadata={"about": About(unit, reason, **more)})


@dataclass(frozen=True, kw_only=True)
class ConfigSection:
    """Keys that a file has below one word."""

    name: ClassVar[str]
    """That word. The section of a tier is the tier's name in metrics, too."""
    prefix: ClassVar[str | None] = None
    """First part of each flat key. None: the name and ``_``."""
    removed: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions, without the section -> what replaces each."""

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value that is not a default came from, by field."""

    @classmethod
    def keys(cls) -> dict[str, tuple[str, About]]:
        """Flat name -> name of the field, and what it is for. In the order of the class."""
        prefix = f"{cls.name}_" if cls.prefix is None else cls.prefix
        return {
            about.flat or f"{prefix}{each.name.rstrip('_')}": (each.name, about)
            for each in fields(cls)
            if (about := each.metadata.get("about"))
        }

    def source(self, name: str) -> str:
        """Where the value of a field came from."""
        return self.sources.get(name, "default")


@dataclass(frozen=True, kw_only=True)
class TierSection(ConfigSection):
    """The keys of one tier. The first key says where its chunks are. None there: the tier is not
    configured."""

    title: ClassVar[str]
    """The tier within a sentence."""
    latency_s: ClassVar[float]
    """Usual seconds from a request to its first byte. Tiers are asked in this order."""
    modules: ClassVar[Sequence[str]] = ()
    """Modules that must be importable. kvtier's extra of the same name installs them."""
    shared: ClassVar[bool] = True
    """Other hosts use the same chunks."""
    medium: ClassVar[Literal["DISK", "P2P", "EXTERNAL_UNSPECIFIED"]] = "EXTERNAL_UNSPECIFIED"
    """Where vLLM's metrics say that a hit came from: a disk of this host, or memory of others. A
    remote store is unspecified there."""
    lmcache: ClassVar[Mapping[str, str]] = {}
    """Schemes of LMCache's ``remote_url`` that this tier serves -> how it is configured here."""

    @property
    def configured(self) -> bool:
        """Whether the tier is configured."""
        name, _ = next(iter(self.keys().values()))
        return getattr(self, name) is not None

    def decided(self) -> Mapping[str, Any]:
        """Values on this host for keys that are not set, by field. Only values that the tier does
        not decide by itself when it is opened."""
        return {}

    @property
    def sized(self) -> bool:
        """Whether the tier can be tried before auto-config has decided sizes."""
        return True

    def daily_writes(self) -> int | None:
        """Most bytes written a day. With a limit, chunks are written when RAM drops them, and not
        as they are saved. None: no limit."""
        return None

    def for_slots(self, slot_bytes: int) -> TierSection:
        """The section for one chunk size of a server, which opens a tier for each size."""
        return self


class Opening(NamedTuple):
    """Surroundings that a tier is opened in."""

    chunk_bytes: int
    """Bytes of a chunk as it is written, which are more than a slot's where chunks are sealed."""
    namespace: bytes
    """First part of each chunk's name where several layouts share a store. Chunks of different
    layouts or encryption keys have different names there."""
    replica: int = 0
    """The engine's data-parallel index."""
    lent: bool = False
    """The tier begins without room of its own: other Stores of this host have it, and lend it."""
    in_huge_pages: Callable[[memoryview], bool] = lambda _: False
    """Whether a slot lies in huge pages."""


class Opened(NamedTuple):
    """A tier that was opened. It owns nothing that its ``close`` does not end."""

    tier: Tier
    threads: int
    """Threads of its lane: how many calls run at once."""
    said: str = ""
    """A line for the log once everything is open."""


Trial = Callable[["TierSection"], str]
"""Saves chunks with this section in one process, loads and compares them in another, and deletes
them. Returns the problem in words, or "" for none."""


def then_tried(
    findings: Iterable[Finding], tried: Trial | None, own: TierSection, do: str
) -> Iterator[Finding]:
    """The findings on a tier. When none of them is a fail, the self-test with the section ``own``
    follows. ``do``: what to do when the self-test fails."""
    found = list(findings)
    yield from found
    if tried is not None and all(finding.state != "fail" for finding in found):
        seen = "chunks written, closed, read and compared by a second process"
        yield Finding.of(f"self-test {own.name}", tried(own), seen, do)


def reached(tier: str, look: Callable[[], str], seen: str, end: str) -> Finding:
    """Whether a store on the network can be used now. ``look``: the tier's ``away``. ``end``: the
    word for the store's part that is asked, for the advice."""
    try:
        return Finding.of(tier, look(), seen, f"look at the network and the {end} from here")
    except KVTierError as error:
        return Finding(tier, "fail", str(error), "correct it: no chunk is kept there before")


class TierFacts:
    """Facts that a probe has found of a tier. A tier's own facts are a subclass."""

    @property
    def host_bytes(self) -> int | None:
        """Memory of this host that the tier's store may still take. None: it takes none."""
        return None

    def measured(self, seconds: float) -> TierFacts:
        """Facts with speeds, measured within ``seconds``. A failure is an unknown fact with
        its reason."""
        return self


class Draft(Protocol):
    """The part of a plan that is one tier's."""

    @property
    def stores(self) -> int:
        """Engines and replicas on this host, which get equal shares."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV a token."""

    def too_small(self, size: int) -> str:
        """Why ``size`` bytes are not worth a tier. "" when one long context fits."""

    def pays(self, speed: Fact[float], latency_s: float | None = None) -> bool:
        """Whether hits are ever loaded sooner than computed. The plan then shows the length from
        which that is so, or leaves the tier out. ``speed``: bytes a second. ``latency_s``: seconds
        to the first byte, where the section's do not apply."""

    def set(self, key: str, value: Value, source: str, reason: str) -> None:
        """Set a key."""

    def show(self, key: str, value: Value, source: str, reason: str) -> None:
        """Show a fact that led to the plan."""

    def take(self, key: str, fact: Fact[T], otherwise: T, because: str) -> T:
        """The fact's value. If it is unknown, ``otherwise``, and the plan shows the assumption."""

    def leave_out(self, reason: str) -> None: ...

    def warn(self, text: str) -> None: ...


class Parts(Protocol):
    """The module of a tier, as a type. The text of this module explains the names."""

    SECTION: type[TierSection]

    def open(self, own: Any, around: Opening) -> Opened:
        """Raises ConfigError or TierError, and leaves nothing open then."""

    def away(self, own: Any) -> str:
        """Why the tier cannot be used now: waiting repairs it, and until then its chunks are
        misses. Empty: it can be used. Takes a few seconds at most. Raises ConfigError or TierError
        for a problem that waiting does not repair."""

    def probe(self, own: Any) -> TierFacts:
        """Facts for the plan. Takes two seconds at most. Raises only ConfigError, for keys that
        cannot be read: a store that is away is a fact."""

    def findings(self, own: Any, tried: Trial | None) -> Iterator[Finding]:
        """Findings for ``kvtier doctor``. ``tried`` may be called with a section of smaller sizes.
        It is None where nothing can be tried."""

    def plan(self, found: Any, draft: Draft) -> None:
        """Set the tier's keys, or leave the tier out. ``found``: the facts of :meth:`probe`, or
        None for a tier that is not configured. Probes nothing."""
