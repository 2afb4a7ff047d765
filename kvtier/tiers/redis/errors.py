"""Errors on the way to a Redis, and error replies of one."""

from __future__ import annotations

from kvtier.tiers.redis.url import Address


class RedisError(Exception):
    """The server, the network or the login failed. The connection is closed."""


class SetupError(RedisError):
    """A fault that only the operator can mend. The text says how."""


class LoginError(SetupError):
    """The user or the password is refused."""


class ProtocolError(RedisError):
    """Bytes that are not a reply to what was asked."""


class MovingError(RedisError):
    """The node is well, but these names are moving to another. This is no miss."""


class MovedError(MovingError):
    """Names of ``slot`` lie on another node. ``address``: None where the server gave none."""

    def __init__(self, slot: int, address: Address | None) -> None:
        super().__init__("these names lie on another node of the cluster")
        self.slot, self.address = slot, address


class WrongSizeError(Exception):
    """A value does not have the size that was asked for. The connection is closed."""


FAULTS = (RedisError, OSError)


class RefusedError(Exception):
    """An error reply of the server, which can stand in lists of replies.

    ``code``: its first word, such as ``OOM``. Its text is printable, short, and hides our
    password."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def login_error(refusal: RefusedError) -> LoginError:
    """Return the error without the server's words, which may repeat user and password."""
    return LoginError(f"login refused ({refusal.code}); correct user and password in redis_url")
