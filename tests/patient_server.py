"""``kvtier`` whose bounds in time no busy host reaches: ``python -m tests.patient_server serve``.

For tests that are about something else: who leaves a crowd first must not have left for its time,
and a store that is late on a busy host is none that is away.
"""

from __future__ import annotations

import sys

from kvtier.admin import http, places
from kvtier.cli.main import main
from kvtier.extensions.objects import bucket
from kvtier.server import connection
from kvtier.server.listening import strangers
from kvtier.tiers.redis.servers import RedisServers
from tests.child_process import DEADLINE_S

NEVER_S = 100 * DEADLINE_S


def be_patient() -> None:
    """With clients that say nothing, and with calls of Redis and of an object store."""
    bucket._BEGIN_S, bucket._ANSWER_S = DEADLINE_S, int(DEADLINE_S)
    connection._GREETING_S = strangers._HANDSHAKE_S = NEVER_S
    places.FIRST_REQUEST_S = http._IDLE_S = NEVER_S
    bounds = RedisServers.__init__.__kwdefaults__
    assert bounds is not None and "timeout_s" in bounds
    bounds["timeout_s"] = DEADLINE_S


if __name__ == "__main__":
    be_patient()
    sys.exit(main())
