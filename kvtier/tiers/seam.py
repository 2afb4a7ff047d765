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

from kvtier.core.errors import ConfigError, KVTierError
from kvtier.core.fact import Fact
from kvtier.tiers.base import Tier

State = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    check: str
    state: State
    seen: str
    do: str = ""

    @classmethod
    def of(cls, check: str, wrong: str, seen: str, do: str) -> Finding:
        """Make a fail if ``wrong`` is not empty, else an ok with ``seen``."""
        return cls(check, "fail", wrong, do) if wrong else cls(check, "ok", seen)


def refused(look: Callable[[], object]) -> str:
    """Return the text of ``look``'s ConfigError, "" without one."""
    try:
        look()
    except ConfigError as error:
        return str(error)
    return ""


Value = int | float | str
T = TypeVar("T", int, float)

NO_URL = "no URL was given"


class Url(Protocol):
    """Reader of a key whose value is a URL. A module can be one."""

    def parse(self, text: str) -> object:
        """Check the text. Raises ConfigError, whose text shows no piece of ``text``."""

    def masked(self, text: str) -> str:
        """Return ``text`` without secrets, for logs."""

    def safe(self, text: str) -> str | None:
        """Return :meth:`masked` of a text that may be a URL of this kind, None of any other."""


class About(NamedTuple):
    unit: str
    """Unit of the value: a word of :data:`kvtier.config.values.PARSERS`, or ``url``."""
    reason: str
    """Line for tables and help. The text behind ``none:`` says what no value means."""
    needs: str = ""
    """Key of the same section without which this one has no effect, and is refused."""
    url: Url | None = None
    """Reader of the value, for the unit ``url``."""
    planned: Literal["", "given", "measured"] = ""
    """Whether a plan sets it: from what the operator gave, or from what the machine has."""
    flag: str = ""
    """Help of the key's flag of ``kvtier plan``. Empty for no flag."""
    flat: str = ""
    """Flat name, if not the section's prefix and the field's name."""


def key(unit: str, reason: str, default: Any = None, **more: Any) -> Any:
    """Make a field of a :class:`ConfigSection`. ``more``: further :class:`About` fields. A trailing
    ``_`` of the field's name is not part of the key."""
    return field(default=default, metadata={"about": About(unit, reason, **more)})


@dataclass(frozen=True, kw_only=True)
class ConfigSection:
    """Keys that a configuration file has below one word."""

    name: ClassVar[str]
    """Word above the keys, which is also the tier's name in metrics."""
    prefix: ClassVar[str | None] = None
    """First part of each flat key, or None for ``name`` with ``_`` behind."""
    removed: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions, without the section -> replacement."""

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Sources of the values that are no defaults, by field."""

    @classmethod
    def keys(cls) -> dict[str, tuple[str, About]]:
        """Return flat name -> field name and :class:`About`, in the order of the class."""
        prefix = f"{cls.name}_" if cls.prefix is None else cls.prefix
        return {
            about.flat or f"{prefix}{each.name.rstrip('_')}": (each.name, about)
            for each in fields(cls)
            if (about := each.metadata.get("about"))
        }

    def source(self, name: str) -> str:
        return self.sources.get(name, "default")


@dataclass(frozen=True, kw_only=True)
class TierSection(ConfigSection):
    """Keys of one tier, which is configured if the first one, the place of its chunks, is set."""

    title: ClassVar[str]
    """Name of the tier within a sentence."""
    latency_s: ClassVar[float]
    """Usual seconds to the first byte. Tiers are asked in this order."""
    modules: ClassVar[Sequence[str]] = ()
    """Modules that the tier needs. kvtier's extra of the tier's name installs them."""
    shared: ClassVar[bool] = True
    """Whether other hosts use the same chunks."""
    medium: ClassVar[Literal["DISK", "P2P", "EXTERNAL_UNSPECIFIED"]] = "EXTERNAL_UNSPECIFIED"
    """Origin of hits in vLLM's metrics: this host's disk, others' memory, or a remote store."""
    lmcache: ClassVar[Mapping[str, str]] = {}
    """Schemes of LMCache's ``remote_url`` -> how to configure the same here."""

    @property
    def configured(self) -> bool:
        name, _ = next(iter(self.keys().values()))
        return getattr(self, name) is not None

    def decided(self) -> Mapping[str, Any]:
        """Return this host's values of unset keys, by field, known before the tier is opened."""
        return {}

    @property
    def sized(self) -> bool:
        """Whether the tier can be tried before auto-config has decided sizes."""
        return True

    def daily_writes(self) -> int | None:
        """Return the most bytes written a day. If set, chunks are written as RAM drops them."""
        return None

    def for_slots(self, slot_bytes: int) -> TierSection:
        """Return the section for one chunk size: a server opens a tier for each size."""
        return self


class Opening(NamedTuple):
    chunk_bytes: int
    """Bytes of a chunk as written: more than a slot's where chunks are sealed."""
    namespace: bytes
    """Part of names in a shared store: other layouts or encryption keys have other names."""
    replica: int = 0
    lent: bool = False
    """Whether the tier begins without room: other Stores of this host have it, and lend it."""
    in_huge_pages: Callable[[memoryview], bool] = lambda _: False


class Opened(NamedTuple):
    """An open tier, which owns nothing that its ``close`` does not end."""

    tier: Tier
    threads: int
    """Threads of the tier's lane, so the most calls at once."""
    said: str = ""
    """Log line once everything is open."""


Trial = Callable[["TierSection"], str]
"""Self-test that saves, loads in a second process, and deletes. Returns the problem, or ""."""


def then_tried(
    findings: Iterable[Finding], tried: Trial | None, own: TierSection, do: str
) -> Iterator[Finding]:
    """Yield ``findings``, then, unless one is a fail, the self-test's. ``do``: its advice."""
    found = list(findings)
    yield from found
    if tried is not None and all(finding.state != "fail" for finding in found):
        seen = "chunks written, closed, read and compared by a second process"
        yield Finding.of(f"self-test {own.name}", tried(own), seen, do)


def reached(tier: str, look: Callable[[], str], seen: str, end: str) -> Finding:
    """Return a finding on whether a store on the network can be used now. ``look``: the tier's
    ``away``. ``end``: the part of the store that the advice names."""
    try:
        return Finding.of(tier, look(), seen, f"look at the network and the {end} from here")
    except KVTierError as error:
        return Finding(tier, "fail", str(error), "correct it: no chunk is kept there before")


class TierFacts:
    """Facts that a tier's probe has found. Subclasses add a tier's own."""

    @property
    def host_bytes(self) -> int | None:
        """Memory of this host that the tier's store may still take, or None if it takes none."""
        return None

    def measured(self, seconds: float) -> TierFacts:
        """Return facts with speeds, measured within ``seconds``, or unknown for a reason."""
        return self


class Draft(Protocol):
    """One tier's part of a plan of auto-config."""

    @property
    def stores(self) -> int:
        """Number of engines and replicas on this host, which get equal shares."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV a token."""

    def too_small(self, size: int) -> str:
        """Return why ``size`` bytes are not worth a tier, "" when one long context fits."""

    def pays(self, speed: Fact[float], latency_s: float | None = None) -> bool:
        """Return whether loading a hit is ever faster than computing it, and show from which
        length. ``latency_s``: to the first byte, instead of the section's."""

    def set(self, key: str, value: Value, source: str, reason: str) -> None: ...

    def show(self, key: str, value: Value, source: str, reason: str) -> None:
        """Show a fact that led to the plan."""

    def take(self, key: str, fact: Fact[T], otherwise: T, because: str) -> T:
        """Return the fact's value, or ``otherwise``, which the plan then shows as an assumption."""

    def leave_out(self, reason: str) -> None: ...

    def warn(self, text: str) -> None: ...


class Parts(Protocol):
    """Type of a tier's module. This module's text explains the names."""

    SECTION: type[TierSection]

    def open(self, own: Any, around: Opening) -> Opened:
        """Open the tier. Raises ConfigError or TierError, and leaves nothing open then."""

    def away(self, own: Any) -> str:
        """Return why the tier cannot be used until time repairs it, or "": its chunks are misses
        meanwhile. Takes a few seconds at most. Raises ConfigError or TierError for a problem that
        waiting does not repair."""

    def probe(self, own: Any) -> TierFacts:
        """Return facts for the plan, within two seconds. Raises only ConfigError, for keys that
        cannot be read: a store that is away is a fact."""

    def findings(self, own: Any, tried: Trial | None) -> Iterator[Finding]:
        """Yield findings for ``kvtier doctor``. ``tried``: self-test, to be given small sizes."""

    def plan(self, found: Any, draft: Draft) -> None:
        """Set the tier's keys, or leave the tier out, without probing. ``found``: facts of
        :meth:`probe`, None for a tier that is not configured."""
